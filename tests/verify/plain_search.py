"""The plain search for scores: the slow twin of `verify/functional/lines.py`, in O(support) a draw.

The theory is in `lab/acceptance/rearrangement.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from lab.acceptance import given_candidates
from lab.acceptance.rearrangement import Rearrangement, bisect
from monge.laws.draws import Draws

Positions = Float64[np.ndarray, " n"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLine(given_candidates.DraftLine):
    """The score map of one node, also given the positions of the draws."""

    def windows(self, token: int) -> Int64[np.ndarray, " own"]:
        return np.flatnonzero(self.tokens.cpu().numpy()[self.line.owners] == token)

    def chances(self, drawn: Sequence[int], draws: Draws) -> dict[int, float]:
        """Accept probability of every distinct draw given the positions of all of them, from one uniform a draw."""
        placed = [(token, self.windows(token), draws.uniform()) for token in drawn]
        on_line = [
            (token, place(self.line, windows, position))
            for token, windows, position in placed
            if windows.size
        ]
        probs = dict.fromkeys(drawn, 0.0)
        chances = winning_chances(self.line, np.array([u for _, u in on_line])) if on_line else ()
        for (token, _), chance in zip(on_line, chances, strict=True):
            probs[token] += float(chance)
        return probs


def place(line: Rearrangement, windows: Int64[np.ndarray, " own"], position: float) -> float:
    """The point of a draw on the line, from a uniform.

    Its token owns one window, or two where the threshold splits it.
    """
    left, right = float(line.edges[windows[0]]), float(line.edges[windows[-1] + 1])
    return min(left + position * (right - left), float(np.nextafter(right, 0.0)))


def score(
    line: Rearrangement, windows: Int64[np.ndarray, " own"], position: float, swap: float
) -> float:
    """Score of a draw, from two uniforms."""
    if windows.size == 0:
        return 1.0  # a mass too small for the line: refused
    u = np.array([place(line, windows, position)])
    partner = partners(line, u)
    return float(partner[0] if swap < line.swap_probs(u, partner)[0] else u[0])


def winning_chances(line: Rearrangement, u: Positions) -> Positions:
    """For draws at known points: the chance of each, over all swaps, to be the one that is accepted.

    Every draw has two possible scores, independent of the others: its own point, and its partner.
    Of equal scores the earlier draw's counts as the smaller.
    """
    partner = partners(line, u)
    swap = line.swap_probs(u, partner)
    scores, probs, draw = np.stack([u, partner]), np.stack([1.0 - swap, swap]), np.arange(u.size)
    mine, theirs = scores[:, :, None, None], scores[None, None]
    is_smaller = (mine < theirs) | ((mine == theirs) & (draw[:, None, None] < draw))
    beats = (is_smaller * probs).sum(axis=2)  # [score, draw, other draw]
    beats[:, draw, draw] = 1.0
    return (probs * (scores < line.threshold) * beats.prod(axis=2)).sum(axis=0)


def partners(line: Rearrangement, u: Positions) -> Positions:
    """The swap partner of each position; a position where the surplus is flat is its own."""
    slopes = line.densities(u) - line.gains[line.windows_of(u)]
    return np.where(slopes == 0.0, u, nearest_below(line, u, slopes > 0.0))


def nearest_below(line: Rearrangement, u: Positions, is_right: Bool[np.ndarray, " n"]) -> Positions:
    """The nearest point, to the right or left of u, beyond which the surplus is below that at u.

    U itself where there is none.

    As `Rearrangement.nearest_below`, in O(s) a position: sums run outwards from u, so what is near
    u keeps all its digits.
    """
    starts, stops, every = line.edges[:-1], line.edges[1:], np.arange(u.size)
    at = u[:, None]
    ahead = np.cumsum((np.maximum(stops, at) - np.maximum(starts, at)) * line.gains, axis=1)
    behind = np.cumsum(
        ((np.minimum(stops, at) - np.minimum(starts, at)) * line.gains)[:, ::-1], axis=1
    )[:, ::-1]
    given = np.pad(ahead, ((0, 0), (1, 0))) - np.pad(behind, ((0, 0), (0, 1)))  # [n, edges]
    below = (_offered(line, at, line.edges) < given) & ((line.edges > at) == is_right[:, None])
    last = starts.size
    edge = np.where(is_right, below.argmax(axis=1), last - below[:, ::-1].argmax(axis=1))
    # The surplus is concave in a window: the window that ends (or starts) in that edge holds the
    # crossing, beyond its peak.
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
    """Integral of the smallest score's density from u to v, cut off at the threshold.

    (b - a) times a sum of products.
    """
    u, v = np.minimum(u, line.threshold), np.minimum(v, line.threshold)
    near, far = 1.0 - u, 1.0 - v
    power, total = np.ones_like(far), np.ones_like(near + far)
    for _ in range(line.width - 1):
        power = power * far
        total = total * near + power
    return (v - u) * total
