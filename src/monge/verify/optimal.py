"""The optimal coupling of one node: every draw gets a score, the smallest one below a threshold is accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal
from monge.transport.numerics import bisect
from monge.transport.rearrangement import Rearrangement
from monge.verify.base import NodeRule

SMALLEST_MASS: Final = 1e-290
"""Draft masses below this have no finite ratio p / q. Such a token has no place on the line and is never accepted as a draw:
less than 1e-284 of total variation, for up to a million tokens."""

Positions = Float64[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class Optimal(NodeRule):
    """The optimal rule for independent draws, with or without deterministic candidates beside them.

    Law:
        The emitted token follows p for K independent draws from q (`Iid`), for deterministic candidates D followed by K
        independent draws from a law that gives them no mass (`Mixed`), and for deterministic candidates alone.

    Rule:
        `alpha = min over sets H of [p(H) + 1 - q(H)^K]`, H outside D; `v0 = 1 - (1 - alpha)^(1/K)`; `a = min(p, mu q)` with mu
        such that a sums to alpha. The support of q lies on [0, 1] by decreasing p / q. Each draw takes a uniform position u in
        the window of its token, and its score is u or the swap partner of u (see `transport/rearrangement.py`), so that scores
        are uniform and token y, if its score is the smallest of K, is below v0 with mass a(y) in all. Accept the draw with the
        smallest score if that is below v0; otherwise emit y proportional to `p - a`, over the whole vocabulary, D included.
        Acceptance is p(D) + alpha, the optimum.

    Cost:
        O(s log s) for the line and O(K^2 s) for the partners of K draws, s = support of q; O(vocab) when no draw is accepted.
        Two uniforms a draw: not enumerable, proved by exact integration instead.

    Reference:
        Own construction, novelty not established. The optimum: Hu et al., arXiv 2502.18779; for K = 2 Khisti et al.,
        arXiv 2410.18234.
    """

    accepts = frozenset[type[Proposal]]({Iid, Mixed, Deterministic})
    is_enumerable = False

    def emit(self, target_law: Law, proposal: Proposal, offers: Sequence[int], draws: Draws) -> int:
        p = target_law
        if not isinstance(proposal, Iid | Mixed):
            return draws.categorical(p)  # no draw to couple with: the target walk is optimal
        drawn = offers[len(proposal.fixed) :] if isinstance(proposal, Mixed) else offers
        part = proposal.law.sparse()
        tokens = part.token_ids[part.probs > SMALLEST_MASS]
        line = Rearrangement.build(p.at(tokens).cpu().numpy(), proposal.law.at(tokens).cpu().numpy(), len(drawn))
        owners = tokens.cpu().numpy()[line.owners]
        scores = [score(line, np.flatnonzero(owners == token), draws.uniform(), draws.uniform()) for token in drawn]
        best = min(range(len(drawn)), key=scores.__getitem__)
        if scores[best] < line.threshold:
            return drawn[best]
        return draws.categorical(_residual(p, tokens, torch.from_numpy(line.accepted_masses).to(tokens.device)))


def score(line: Rearrangement, windows: Int64[np.ndarray, " own"], position: float, swap: float) -> float:
    """Score of a draw, from two uniforms; its token owns one window, or two neighbours where the threshold splits it."""
    if windows.size == 0:
        return 1.0  # a mass too small for the line: refused
    left, right = float(line.edges[windows[0]]), float(line.edges[windows[-1] + 1])
    u = np.array([min(left + position * (right - left), float(np.nextafter(right, 0.0)))])
    partner = partners(line, u)
    return float(partner[0] if swap < line.swap_probs(u, partner)[0] else u[0])


def partners(line: Rearrangement, u: Positions) -> Positions:
    """The swap partner of each position; a position where the surplus is flat is its own."""
    slopes = line.densities(u) - line.gains[line.windows_of(u)]
    return np.where(slopes == 0.0, u, nearest_below(line, u, slopes > 0.0))


def nearest_below(line: Rearrangement, u: Positions, is_right: Bool[np.ndarray, " n"]) -> Positions:
    """The nearest point, to the right or left of u, beyond which the surplus is below that at u; u itself where there is none.

    As `Rearrangement.nearest_below`, in O(s) a position: sums run outwards from u, so what is near u keeps all its digits.
    """
    starts, stops, every = line.edges[:-1], line.edges[1:], np.arange(u.size)
    at = u[:, None]
    ahead = np.cumsum((np.maximum(stops, at) - np.maximum(starts, at)) * line.gains, axis=1)
    behind = np.cumsum(((np.minimum(stops, at) - np.minimum(starts, at)) * line.gains)[:, ::-1], axis=1)[:, ::-1]
    given = np.pad(ahead, ((0, 0), (1, 0))) - np.pad(behind, ((0, 0), (0, 1)))  # [n, edges]
    below = (_offered(line, at, line.edges) < given) & ((line.edges > at) == is_right[:, None])
    last = starts.size
    edge = np.where(is_right, below.argmax(axis=1), last - below[:, ::-1].argmax(axis=1))
    # The surplus is concave in a window: the window that ends (or starts) in that edge holds the crossing, beyond its peak.
    window = np.clip(np.where(is_right, edge - 1, edge), 0, last - 1)
    near = np.where(is_right, window, window + 1)
    is_own = window == line.windows_of(u)
    anchor, spent = np.where(is_own, u, line.edges[near]), np.where(is_own, 0.0, given[every, near])
    low = np.where(is_right, np.maximum(line.peaks[window], u), starts[window])
    high = np.where(is_right, stops[window], np.minimum(line.peaks[window], u))

    def is_past(v: Positions) -> Bool[np.ndarray, " n"]:
        return (_offered(line, u, v) < spent + line.gains[window] * (v - anchor)) == is_right

    return np.where(below.any(axis=1), bisect(is_past, low, high), u)


def _offered(line: Rearrangement, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Integral of the smallest score's density from u to v, cut off at the threshold: (b - a) times a sum of products."""
    u, v = np.minimum(u, line.threshold), np.minimum(v, line.threshold)
    near, far = 1.0 - u, 1.0 - v
    power, total = np.ones_like(far), np.ones_like(near + far)
    for _ in range(line.width - 1):
        power = power * far
        total = total * near + power
    return (v - u) * total


def _residual(p: Law, tokens: Tensor, accepted: Tensor) -> Law:
    part = p.sparse()
    index = torch.searchsorted(tokens, part.token_ids).clamp_max(tokens.numel() - 1)
    # accepted <= p, but for the rounding of the product mu q.
    left = torch.where(tokens[index] == part.token_ids, part.probs - accepted[index], part.probs).clamp_min(0.0)
    kept = left > 0.0
    if not bool(kept.any()):
        return p  # all of p is accepted: rounding alone brings a caller here
    return SparseLaw(part.token_ids[kept], left[kept] / left.sum())
