"""P(every draw without replacement falls in H), by racing exponential clocks.

Drawing K tokens without replacement from q is the order of arrival of independent clocks, token i
at rate q_i. All K draws lie in H when at least K clocks of H ring before the first clock outside.
"""

import math
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.transport.laws import Vector

FIRST_TIME: Final = 1e-18
"""Start of the integral: clocks outside H, of rates that sum to at most 1, ring before it with probability 1e-18."""

LAST_WAIT: Final = 42.0
"""End of the integral, in mean waits of the slowest last clock: exp(-42) < 1e-18 is left."""


def log_step(width: int) -> float:
    """Step of the trapezoidal rule in log time.

    The integrand is analytic for |Im log t| < pi/2 and, up to pi/3, at most about 2^K large, so the
    error on the line is below `2^K exp(-2 pi (pi/3) / step)`, which this step keeps below 1e-19 for
    every K. A power of two: multiples of it are exact.
    """
    return 2.0 ** math.floor(math.log2(2.0 * math.pi**2 / 3.0 / (width * math.log(2.0) + 45.0)))


def prefix_containment(
    q: Float64[np.ndarray, " support"], width: int
) -> Float64[np.ndarray, " support"]:
    """P(all `width` draws without replacement from q are among its first h tokens), for h = 1..support.

    Args:
        q: Positive masses in the order that makes the prefixes; they sum to 1.
        width: Number of draws; the whole support is drawn where that is smaller.

    Returns:
        Containment of each prefix, absolute error below 1e-14; 1 for the whole support.
    """
    width = min(width, q.size)
    if width == 1:
        return np.concatenate([np.cumsum(q)[:-1], [1.0]])
    return _pairs(q) if width == 2 else _race(q, width)


def _pairs(q: Float64[np.ndarray, " support"]) -> Float64[np.ndarray, " support"]:
    """Closed form for two draws: sum over i in H of q_i (q(H) - q_i) / (1 - q_i)."""
    before = np.concatenate([[0.0], np.cumsum(q)[:-1]])
    after = np.concatenate([np.cumsum(q[::-1])[-2::-1], [0.0]])
    odds = q / (before + after)  # q_i / (1 - q_i), exact also where q_i is close to one
    # Token h joins as second draw after each earlier token, or as first draw before one: no term is
    # ever subtracted.
    joins = q * np.concatenate([[0.0], np.cumsum(odds)[:-1]]) + odds * before
    return np.concatenate([np.cumsum(joins)[:-1], [1.0]])


def _race(q: Float64[np.ndarray, " support"], width: int) -> Float64[np.ndarray, " support"]:
    """Q(H) = integral of A exp(-A t) P(at least K clocks of H rang by t) dt, with A = q(outside H)."""
    outside = np.cumsum(q[::-1])[-2::-1]  # A of every prefix but the last
    stop = np.log(LAST_WAIT / outside[-1])
    step = log_step(width)
    times = np.exp(np.arange(np.log(FIRST_TIME), stop + step, step))
    rang = np.zeros(
        (width + 1, times.size)
    )  # [number of clocks that rang, the last entry for `width` or more; times]
    rang[0] = 1.0
    contained = np.ones(q.size)
    for prefix, rate in enumerate(outside.tolist()):
        rings = -np.expm1(-q[prefix] * times)
        moved = rang[:-1] * rings
        rang[:-1] -= moved
        rang[1:] += moved
        contained[prefix] = step * float((rate * times * np.exp(-rate * times)) @ rang[-1])
    return contained


def distinct_inclusion(q: Vector, width: int) -> Vector:
    """P(token is among `width` draws without replacement from q), in closed form for two draws."""
    tokens = np.flatnonzero(q)
    included = np.zeros(q.size)
    if width >= tokens.size:
        included[tokens] = 1.0
    elif width == 1:
        included[tokens] = q[tokens]
    elif width == 2:
        odds = q[tokens] / (1.0 - q[tokens])
        included[tokens] = q[tokens] * (1.0 + odds.sum() - odds)
    else:
        included[tokens] = _race_inclusion(q[tokens], width)
    return included


def _race_inclusion(
    q: Float64[np.ndarray, " support"], width: int
) -> Float64[np.ndarray, " support"]:
    """P(fewer than K of the other clocks ring before clock i), by quadrature in log time."""
    step = log_step(width)
    times = np.exp(np.arange(np.log(FIRST_TIME), np.log(LAST_WAIT / q.min()) + step, step))
    rings = -np.expm1(-q[:, None] * times)  # [tokens, times]
    # How many of the tokens seen so far rang, K or more left out.
    first = np.zeros((width, times.size))
    first[0] = 1.0
    behind = [first]
    for ring in rings[:0:-1]:
        behind.append(_one_more(behind[-1], ring))
    included = np.zeros(q.size)
    for token, (rate, ring) in enumerate(zip(q, rings, strict=True)):
        at_most = behind.pop().cumsum(axis=0)
        fewer = (first * at_most[::-1]).sum(axis=0)  # at most K - 1 together
        included[token] = step * float((rate * times * np.exp(-rate * times)) @ fewer)
        first = _one_more(first, ring)
    return included


def _one_more(
    counts: Float64[np.ndarray, "width times"], ring: Float64[np.ndarray, " times"]
) -> np.ndarray:
    moved = counts * ring
    more = counts - moved
    more[1:] += moved[:-1]
    return more
