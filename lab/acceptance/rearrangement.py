"""The rearrangement coupling: one score per independent candidate, the smallest score below a threshold is accepted.

p = target law (or sub-target: p outside deterministic candidates, or s p in a tree), q = draft law,
K = `width`. The optimum is alpha = min over H of [ p(H) + 1 - q(H)^K ].

Quantile space: the support of q lies side by side on [0, 1] by *decreasing* ratio p/q, token y on a
window of length q(y). The smallest of K uniform scores has density K (1-v)^(K-1); cut off at v0 = 1
- (1 - alpha)^(1/K) it has mass alpha:

    xt(v) = K (1-v)^(K-1) for v < v0, else 0        X(v) = integral of xt

Token y is to receive a(y) = q(y) g(y), g = min(p/q, mu), the flattest masses that sum to alpha.
With G the integral of g along [0, 1], E = X - G >= 0 vanishes at both ends (Hardy, Littlewood,
Polya). A candidate draws its position u in its own window; rising and falling positions of E are
*swap partners* at equal height, last in first out; the score is the partner u' with probability

    m(u) = ( xt(u) - g(u) ) / ( xt(u) - xt(u') ),   else u.

|dE| is equal at both ends, so m(u) du = m(u') du': scores stay uniform; and E[xt(score) | u] = g: every token receives a(y).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum
from monge.transport.laws import Vector, by_ratio, check_law, check_sub_law

Real = TypeVar("Real", float, np.ndarray)
Points = Float64[np.ndarray, " n"]
Sides = Bool[np.ndarray, " n"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rearrangement:
    """The score map of one node.

    Law:
        Accept the candidate with the smallest score if that is below `threshold`, else emit from p
        - a, over the whole vocabulary: the output law is p, and the acceptance is the optimum for
        independent candidates.

    Rule:
        See the head of this module. Windows are split at v0, so that xt is smooth in each.

    Cost:
        One sort and prefix sums; a partner is one search over the windows and one bisection.

    Reference:
        Own construction (`monge.verify.optimal`); novelty not established. Optimum: Hu
        et al., arXiv 2502.18779.

    Args:
        width: K.
        num_tokens: Size of the vocabulary.
        alpha: Accepted mass.
        threshold: v0.
        edges: Borders of the windows, from 0 to 1, `[windows + 1]`.
        owners: Token of each window, `[windows]`.
        gains: g in each window, `[windows]`.
        peaks: Maximiser of E, which is concave in a window, `[windows]`.
        accepted_masses: a, `[vocab]`.
    """

    width: int
    num_tokens: int
    alpha: float
    threshold: float
    edges: Float64[np.ndarray, " edges"]
    owners: Int64[np.ndarray, " windows"]
    gains: Float64[np.ndarray, " windows"]
    peaks: Float64[np.ndarray, " windows"]
    accepted_masses: Vector

    @classmethod
    def build(cls, p: Vector, q: Vector, width: int) -> "Rearrangement":
        """The score map for `width` independent draws from q; p may sum to less than one.

        Raises:
            LawError: If p or q is no (sub-)law, or they do not cover one vocabulary.
        """
        p, q = check_sub_law("target", p), check_law("draft law", q)
        alpha = iid_optimum(p, q, width).acceptance
        threshold = 1.0 if alpha >= 1.0 else -float(np.expm1(np.log1p(-alpha) / width))
        ascending, ratios = by_ratio(p, q)
        tokens, ratios = ascending[::-1], ratios[::-1]
        line = _ceiling(p[tokens], q[tokens], alpha)
        accepted = np.zeros(p.size)
        accepted[tokens] = np.minimum(p[tokens], line * q[tokens])
        gains = np.minimum(ratios, line)
        edges = np.concatenate([[0.0], np.cumsum(q[tokens])])
        edges /= edges[-1]  # takes the rounding of the sum away: the last window ends at one
        split = int(np.searchsorted(edges, threshold))
        if edges[split] != threshold:
            edges = np.insert(edges, split, threshold)
            tokens, gains = (
                np.insert(tokens, split, tokens[split - 1]),
                np.insert(gains, split, gains[split - 1]),
            )
        return cls(
            width=width,
            num_tokens=p.size,
            alpha=alpha,
            threshold=threshold,
            edges=edges,
            owners=tokens,
            gains=gains,
            peaks=_peaks(edges, gains, width, threshold),
            accepted_masses=accepted,
        )

    def densities(self, v: Points) -> Points:
        """Density xt of the smallest score, cut off at the threshold."""
        return np.where(v < self.threshold, self.width * (1.0 - v) ** (self.width - 1), 0.0)

    def windows_of(self, u: Points) -> Int64[np.ndarray, " n"]:
        """Index of the window of each position in [0, 1]; windows are closed on the left, the last on both sides."""
        return np.minimum(np.searchsorted(self.edges, u, side="right"), self.owners.size) - 1

    def heights(self, u: Points) -> Points:
        """Surplus E: mass on offer up to u, minus what the tokens up to u are to receive."""
        return self._offered(np.zeros_like(u), u) + self._given(u, self.edges[:1])[:, 0]

    def partners(self, u: Points) -> Points:
        """The swap partner of each position: itself if E is flat there, or zero but for rounding."""
        slopes = self.densities(u) - self.gains[self.windows_of(u)]
        return np.where(slopes == 0.0, u, self.nearest_below(u, slopes > 0.0))

    def nearest_below(self, u: Points, is_right: Sides) -> Points:
        """The nearest point, to the right or left of u, beyond which E is below E(u); u itself if there is none.

        Everything is counted from u on: differences of E itself would lose half of the digits where
        E is almost flat.
        """
        every, num_windows = np.arange(u.size), self.owners.size
        given = self._given(u, self.edges)  # [n, edges]
        rises = self._offered(u[:, None], self.edges) - given
        below = (rises < 0.0) & ((self.edges > u[:, None]) == is_right[:, None])
        edge = np.where(is_right, below.argmax(axis=1), num_windows - below[:, ::-1].argmax(axis=1))
        # E is concave in a window, so the window that ends (or starts) in that edge holds the
        # crossing, beyond its peak.
        landing = np.clip(np.where(is_right, edge - 1, edge), 0, num_windows - 1)
        near = np.where(is_right, landing, landing + 1)
        is_inside = landing == self.windows_of(u)
        anchor = np.where(is_inside, u, self.edges[near])
        spent = np.where(is_inside, 0.0, given[every, near])
        peaks = self.peaks[landing]
        low = np.where(is_right, np.maximum(peaks, u), self.edges[landing])
        high = np.where(is_right, self.edges[landing + 1], np.minimum(peaks, u))

        def is_past(v: Points) -> Sides:
            rise = self._offered(u, v) - (spent + self.gains[landing] * (v - anchor))
            return (rise < 0.0) == is_right

        return np.where(below.any(axis=1), bisect(is_past, low, high), u)

    def swap_probs(self, u: Points, partners: Points) -> Points:
        """Probability m(u) that the score is the partner."""
        here, there = self.densities(u), self.densities(partners)
        surplus = here - self.gains[self.windows_of(u)]
        # Equal densities: nothing to exchange (K = 1 away from the threshold, or a position that is
        # its own partner).
        swap = np.divide(surplus, here - there, out=np.zeros_like(u), where=here != there)
        return np.clip(swap, 0.0, 1.0)  # in [0, 1] but for rounding where E touches zero

    def score(self, token: int, position: float, swap: float) -> float:
        """The score of a candidate, from two uniforms in [0, 1).

        Raises:
            LawError: If the token cannot be drafted.
        """
        mine = np.flatnonzero(self.owners == token)
        if mine.size == 0:
            raise LawError(f"score: token {token} has no draft mass, so it cannot be a candidate")
        left, right = float(self.edges[mine[0]]), float(self.edges[mine[-1] + 1])
        u = np.array([min(left + position * (right - left), float(np.nextafter(right, 0.0)))])
        partner = self.partners(u)
        return float(partner[0] if swap < self.swap_probs(u, partner)[0] else u[0])

    def _offered(
        self, u: Float64[np.ndarray, "..."], v: Float64[np.ndarray, "..."]
    ) -> Float64[np.ndarray, "..."]:
        """X(v) - X(u), without subtracting two numbers close to each other."""
        u, v = np.minimum(u, self.threshold), np.minimum(v, self.threshold)
        return (v - u) * power_quotient(1.0 - u, 1.0 - v, self.width)

    def _given(self, u: Points, v: Float64[np.ndarray, " m"]) -> Float64[np.ndarray, "n m"]:
        """G(v) - G(u), as a sum over the windows in between."""
        starts, stops = self.edges[:-1], self.edges[1:]
        distance = np.clip(v[:, None], starts, stops) - np.clip(
            u[:, None, None], starts, stops
        )  # [n, m, windows]
        return distance @ self.gains


def _peaks(
    edges: Float64[np.ndarray, " edges"],
    gains: Float64[np.ndarray, " windows"],
    width: int,
    threshold: float,
) -> Float64[np.ndarray, " windows"]:
    """Return the points where xt crosses g from above, clipped to the window."""
    left, right = edges[:-1], edges[1:]
    if width == 1:
        crossing = np.where(gains < 1.0, right, left)
    else:
        crossing = 1.0 - (np.minimum(gains, width) / width) ** (1.0 / (width - 1))
    return np.where(left < threshold, np.clip(crossing, left, right), left)


def _ceiling(
    p: Float64[np.ndarray, " support"], q: Float64[np.ndarray, " support"], total: float
) -> float:
    """The mu with `sum(min(p, mu q)) = total`, tokens by *decreasing* p/q.

    If total is sum(p), it is the largest ratio.
    """
    # With mu at the k-th ratio, the tokens before it receive mu q and the others keep p: the sum
    # falls with k.
    ratios = p / q
    capped = np.concatenate([[0.0], np.cumsum(q)])
    kept = np.concatenate([np.cumsum(p[::-1])[::-1], [0.0]])
    count = int(np.count_nonzero(ratios * capped[:-1] + kept[:-1] > total))
    if count == 0:
        return float(ratios[0])
    # mu lies between two neighbouring ratios; rounding of a difference over a tiny sum may not
    # carry it outside.
    mu = (total - kept[count]) / capped[count]
    lowest = float(ratios[count]) if count < q.size else float(mu)
    return float(np.clip(mu, lowest, float(ratios[count - 1])))


def bisect(is_past: Callable[[Points], Sides], low: Points, high: Points) -> Points:
    """The borders of conditions that are false left of them and true right of them, both ends included.

    It halves until the two sides are neighbouring floats, so there is no tolerance to choose.
    """
    while True:
        middle = 0.5 * (low + high)
        if not ((low < middle) & (middle < high)).any():
            return high
        past = is_past(middle)
        high = np.where(past, middle, high)
        low = np.where(past, low, middle)


def power_quotient(a: Real, b: Real, power: int) -> Real:
    """(b^n - a^n) / (b - a) as a sum of n products.

    The mean of n u^(n-1) between a and b, also where they meet.
    """
    total = b ** (power - 1)
    for degree in range(1, power):
        total = total + a**degree * b ** (power - 1 - degree)
    return total
