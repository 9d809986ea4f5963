"""The rearrangement coupling: one score per independent candidate, the smallest score below a threshold is accepted.

p = target law (or sub-target: p outside deterministic candidates, or s p in a tree), q = draft law, K = `width`.
The optimum is alpha = min over H of [ p(H) + 1 - q(H)^K ].

Quantile space: the support of q lies side by side on [0, 1] by *decreasing* ratio p/q, token y on a window of length q(y). The
smallest of K uniform scores has density K (1-v)^(K-1); cut off at v0 = 1 - (1 - alpha)^(1/K) it has mass alpha:

    xt(v) = K (1-v)^(K-1) for v < v0, else 0        X(v) = integral of xt

Token y is to receive a(y) = q(y) g(y), g = min(p/q, mu), the flattest masses that sum to alpha. With G the integral of g along
[0, 1], E = X - G >= 0 vanishes at both ends (Hardy, Littlewood, Polya). A candidate draws its position u in its own window; rising
and falling positions of E are *swap partners* at equal height, last in first out; the score is the partner u' with probability

    m(u) = ( xt(u) - g(u) ) / ( xt(u) - xt(u') ),   else u.

|dE| is equal at both ends, so m(u) du = m(u') du': scores stay uniform; and E[xt(score) | u] = g: every token receives a(y).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum
from monge.transport.clamps import ceiling
from monge.transport.laws import by_ratio, check_law, check_sub_law
from monge.transport.roots import bisect


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rearrangement:
    """The score map of one node.

    Law:
        Accept the candidate with the smallest score if that is below `threshold`, else emit from p - a, over the whole
        vocabulary: the output law is p, and the acceptance is the optimum for independent candidates.

    Rule:
        See the head of this module. Windows are split at v0, so that xt is smooth in each.

    Cost:
        One sort and prefix sums; a partner is one search over the windows and one bisection.

    Reference:
        Own construction (`docs/concepts/optimal_coupling.md`); novelty not established. Optimum: Hu et al., arXiv 2502.18779.

    Args:
        width: K.
        num_tokens: Size of the vocabulary.
        alpha: Accepted mass.
        threshold: v0.
        edges: Borders of the windows, from 0 to 1, `[windows + 1]`.
        owners: Token of each window, `[windows]`.
        gains: g in each window, `[windows]`.
        heights: E at the edges, `[windows + 1]`.
        peaks: Where E, concave in a window, is largest, `[windows]`.
        accepted_masses: a, `[vocab]`.
    """

    width: int
    num_tokens: int
    alpha: float
    threshold: float
    edges: Float64[np.ndarray, " edges"]
    owners: Int64[np.ndarray, " windows"]
    gains: Float64[np.ndarray, " windows"]
    heights: Float64[np.ndarray, " edges"]
    peaks: Float64[np.ndarray, " windows"]
    accepted_masses: Float64[np.ndarray, " vocab"]

    @classmethod
    def build(
        cls, p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"], width: int
    ) -> "Rearrangement":
        """The score map for `width` independent draws from q; p may sum to less than one.

        Raises:
            LawError: If p or q is no (sub-)law, or they do not cover one vocabulary.
        """
        p, q = check_sub_law("target", p), check_law("draft law", q)
        alpha = iid_optimum(p, q, width).acceptance
        threshold = 1.0 if alpha >= 1.0 else -float(np.expm1(np.log1p(-alpha) / width))
        ascending, ratios = by_ratio(p, q)
        tokens, ratios = ascending[::-1], ratios[::-1]
        line = ceiling(p[tokens], q[tokens], alpha)
        accepted = np.zeros(p.size)
        accepted[tokens] = np.minimum(p[tokens], line * q[tokens])
        gains = np.minimum(ratios, line)
        edges = np.concatenate([[0.0], np.cumsum(q[tokens])])
        edges /= edges[-1]  # takes the rounding of the sum away: the last window ends at one
        split = int(np.searchsorted(edges, threshold))
        if edges[split] != threshold:
            edges = np.insert(edges, split, threshold)
            tokens, gains = np.insert(tokens, split, tokens[split - 1]), np.insert(gains, split, gains[split - 1])
        received = 1.0 - (1.0 - np.minimum(edges, threshold)) ** width
        heights = received - np.concatenate([[0.0], np.cumsum(gains * np.diff(edges))])
        heights[-1] = 0.0  # X and G both end at alpha
        return cls(
            width=width,
            num_tokens=p.size,
            alpha=alpha,
            threshold=threshold,
            edges=edges,
            owners=tokens,
            gains=gains,
            heights=heights,
            peaks=_peaks(edges, gains, width, threshold),
            accepted_masses=accepted,
        )

    def density(self, v: float) -> float:
        """xt: density of the smallest score, cut off at the threshold."""
        return self.width * (1.0 - v) ** (self.width - 1) if v < self.threshold else 0.0

    def window_of(self, u: float) -> int:
        """Index of the window that contains a position in [0, 1)."""
        return int(np.searchsorted(self.edges, u, side="right")) - 1

    def height(self, u: float) -> float:
        """E: accepted mass on offer up to u, minus what the tokens up to u are to receive."""
        return self._height_in(self.window_of(u), u) if u < 1.0 else 0.0

    def partner(self, u: float) -> float:
        """The swap partner of a position: the nearest point, on the side to which E does not rise, where E falls below E(u).

        Positions where E is flat are their own partners.
        """
        window = self.window_of(u)
        slope = self.density(u) - self.gains[window]
        if slope > 0.0:
            return self.next_below(u)
        return self.last_below(u) if slope < 0.0 else u

    def swap_prob(self, u: float, partner: float) -> float:
        """m(u): probability that the score is the partner."""
        here, there = self.density(u), self.density(partner)
        if here == there:  # nothing to win or lose: K = 1 away from the threshold, or a position that is its own partner
            return 0.0
        gain = float(self.gains[self.window_of(u)])
        return float(np.clip((here - gain) / (here - there), 0.0, 1.0))  # in [0, 1] but for rounding where E touches zero

    def score(self, token: int, position: float, swap: float) -> float:
        """The score of a candidate, from two uniforms in [0, 1).

        Raises:
            LawError: If the token cannot be drafted.
        """
        mine = np.flatnonzero(self.owners == token)
        if mine.size == 0:
            raise LawError(f"score: token {token} has no draft mass, so it cannot be a candidate")
        left, right = float(self.edges[mine[0]]), float(self.edges[mine[-1] + 1])
        u = min(left + position * (right - left), float(np.nextafter(right, 0.0)))
        partner = self.partner(u)
        return partner if swap < self.swap_prob(u, partner) else u

    def _height_in(self, window: int, u: float) -> float:
        left = float(self.edges[window])
        # X(u) - X(left), without subtracting two numbers close to one
        risen = 0.0 if left >= self.threshold else (u - left) * _mean_density(1.0 - left, 1.0 - u, self.width)
        return float(self.heights[window]) + risen - float(self.gains[window]) * (u - left)

    def next_below(self, u: float) -> float:
        """First point right of u where E is below E(u); u itself where E(u) is zero but for rounding."""
        window = self.window_of(u)
        level = self._height_in(window, u)
        below = np.flatnonzero(self.heights[window + 1 :] < level)
        if below.size == 0:
            return u
        landing = window + int(below[0])
        left, right = float(self.peaks[landing]), float(self.edges[landing + 1])
        if landing == window:
            return bisect(self._falls_back(u, window), left, right)
        return bisect(lambda v: self._height_in(landing, v) < level, left, right)

    def last_below(self, u: float) -> float:
        """Last point left of u where E is below E(u); u itself where E(u) is zero but for rounding."""
        window = int(np.searchsorted(self.edges, u, side="left")) - 1  # the window that ends in u, if one does
        level = self._height_in(window, u)
        below = np.flatnonzero(self.heights[: window + 1] < level)
        if below.size == 0:
            return u
        landing = int(below[-1])
        left, right = float(self.edges[landing]), min(float(self.peaks[landing]), u)
        if landing == window:
            return bisect(self._falls_back(u, window), left, right)
        return bisect(lambda v: self._height_in(landing, v) >= level, left, right)

    def _falls_back(self, u: float, window: int) -> Callable[[float], bool]:
        # Within one window E(v) = E(u) means that xt averages to g between u and v. Near a peak E itself is flat, and comparing
        # heights would lose half of the digits.
        gain = float(self.gains[window])
        return lambda v: _mean_density(1.0 - u, 1.0 - v, self.width) < gain


def _mean_density(w: float, other: float, width: int) -> float:
    """Mean of K w^(K-1) between two points: (w^K - w'^K) / (w - w'), without the subtractions."""
    total = 0.0
    for power in range(width):
        total += w**power * other ** (width - 1 - power)
    return total


def _peaks(
    edges: Float64[np.ndarray, " edges"], gains: Float64[np.ndarray, " windows"], width: int, threshold: float
) -> Float64[np.ndarray, " windows"]:
    """Where xt crosses g from above, clipped to the window."""
    left, right = edges[:-1], edges[1:]
    if width == 1:
        crossing = np.where(gains < 1.0, right, left)
    else:
        crossing = 1.0 - (np.minimum(gains, width) / width) ** (1.0 / (width - 1))
    return np.where(left < threshold, np.clip(crossing, left, right), left)
