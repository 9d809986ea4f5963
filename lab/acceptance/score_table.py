"""The exact law of what the rearrangement coupling accepts, given the drawn candidates.

Given its token y, the score of a candidate has density

    f_y(v) = [ 1(v in window of y) (1 - m(v)) + 1(partner of v in window of y) m(v) ] / q(y),

because m(u) du = m(u') du' moves the partner's share to v itself. Between neighbouring *break
points* (window edges, peaks of E, partners of edges) owner and partner's owner are constant and m
is analytic: it is no polynomial, since partners are roots of polynomials, so pieces are integrated
by Gauss-Legendre rules that reach rounding.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from numpy.polynomial import legendre

from lab.acceptance.rearrangement import Rearrangement
from monge.transport.candidates import TokenTuple

PIECE_TOLERANCE: Final = 1e-14
"""Largest change of a piece's integral of m by halving: rounding of a sum of numbers below one.

It also ends the halving, since m lies in [0, 1] and a piece this short changes nothing.
"""

NUM_NODES: Final = 20
"""Gauss-Legendre nodes per piece: rounding for analytic integrands without a near-by singularity."""


def _running_integral() -> Float64[np.ndarray, "nodes nodes"]:
    """The matrix from values at the nodes on [0, 1] to integrals from 0 to each of them.

    Exact for polynomials of degree `NUM_NODES` - 1.
    """
    degrees = np.arange(NUM_NODES)
    values = legendre.legvander(_NODES, NUM_NODES)
    coefficients = (2 * degrees + 1)[:, None] / 2.0 * values[:, :NUM_NODES].T * _NODE_WEIGHTS
    integrals = np.empty((NUM_NODES, NUM_NODES))
    integrals[:, 0] = _NODES + 1.0
    # The integral of P_n from -1 is (P_{n+1} - P_{n-1}) / (2n + 1).
    integrals[:, 1:] = (values[:, 2:] - values[:, : NUM_NODES - 1]) / (2 * degrees[1:] + 1)
    return integrals @ coefficients / 2.0


_NODES, _NODE_WEIGHTS = legendre.leggauss(NUM_NODES)  # on [-1, 1]
_UNIT: Final = (_NODES + 1.0) / 2.0
_RUNNING_INTEGRAL: Final = _running_integral()
# Where xt just touches g the partner moves like a square root; the substitution u = 3 s^2 - 2 s^3
# makes that analytic in s.
_PLACES: Final = _UNIT**2 * (3.0 - 2.0 * _UNIT)
_SLOPES: Final = 6.0 * _UNIT * (1.0 - _UNIT)
_WEIGHTS: Final = _NODE_WEIGHTS / 2.0 * _SLOPES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreLaw:
    """Laws of the scores of some tokens, at the nodes of a quadrature.

    Args:
        tokens: Tokens with a score, `distinct` of them.
        weights: Quadrature weights, summing to the length of the accepted range, `[nodes]`.
        density: Density of the score of each token, `[distinct, nodes]`.
        loses: Probability that a candidate with that token loses against a score at the node,
            `[distinct, nodes]`.
    """

    tokens: tuple[int, ...]
    weights: Float64[np.ndarray, " nodes"]
    density: Float64[np.ndarray, "distinct nodes"]
    loses: Float64[np.ndarray, "distinct nodes"]

    def winner_probs(self, candidate_ids: TokenTuple) -> dict[int, float]:
        """P(the best score is held by token x, and lies in the accepted range), for every distinct candidate x.

        Copies of one token draw independent scores: x wins with probability integral of n f F^(n-1)
        prod over others of F^n.
        """
        rows = {token: self.tokens.index(token) for token in candidate_ids}
        copies = Counter(candidate_ids)
        probs: dict[int, float] = {}
        for token, row in rows.items():
            integrand = self.weights * self.density[row]
            for other, count in copies.items():
                factor = self.loses[rows[other]]
                integrand = integrand * (
                    count * factor ** (count - 1) if other == token else factor**count
                )
            probs[token] = float(integrand.sum())
        return probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreTable:
    """Everything about the scores of one node that does not depend on the drawn tuple.

    Args:
        owners: Token whose window holds the piece, `[pieces]`.
        partners: Token whose window holds the piece's partners, `[pieces]`.
        accepted: One for pieces below the threshold, zero for others, `[pieces]`.
        weights: Quadrature weights, `[pieces, nodes]`.
        swap: m at the nodes, `[pieces, nodes]`.
        swapped: Integral of m from the start of the piece to each node, `[pieces, nodes]`.
        walked: Distance from the start of the piece to each node, `[pieces, nodes]`.
    """

    owners: Int64[np.ndarray, " pieces"]
    partners: Int64[np.ndarray, " pieces"]
    accepted: Float64[np.ndarray, " pieces"]
    weights: Float64[np.ndarray, "pieces nodes"]
    swap: Float64[np.ndarray, "pieces nodes"]
    swapped: Float64[np.ndarray, "pieces nodes"]
    walked: Float64[np.ndarray, "pieces nodes"]

    @classmethod
    def build(cls, scores: Rearrangement) -> "ScoreTable":
        """Find the pieces and tabulate the swap probability on each."""
        starts, lengths, swap = _smooth_pieces(scores, _break_points(scores))
        middles = starts + 0.5 * lengths
        owners = scores.owners[scores.windows_of(middles)]
        partners = scores.owners[scores.windows_of(scores.partners(middles))]
        return cls(
            owners=owners,
            partners=partners,
            accepted=np.where(starts < scores.threshold, 1.0, 0.0),
            weights=lengths[:, None] * _WEIGHTS,
            swap=swap,
            swapped=lengths[:, None] * ((swap * _SLOPES) @ _RUNNING_INTEGRAL.T),
            walked=lengths[:, None] * _PLACES,
        )

    def score_law(self, tokens: tuple[int, ...]) -> ScoreLaw:
        """Score laws of some tokens; a candidate loses against v when its own score is larger."""
        density, loses = [], []
        for token in tokens:
            owns, receives = (self.owners == token)[:, None], (self.partners == token)[:, None]
            dense = owns * (1.0 - self.swap) + receives * self.swap
            totals = (self.weights * dense).sum(axis=1)
            before = (np.cumsum(totals) - totals)[:, None]
            below = before + owns * (self.walked - self.swapped) + receives * self.swapped
            length = totals.sum()
            if length > 0.0:
                density.append(dense / length)
                loses.append(np.maximum(1.0 - below / length, 0.0))  # rounding at the far end
            # A window too short for float64: the token, drafted with probability below 1e-16, is
            # never accepted.
            else:
                density.append(np.zeros_like(dense))
                loses.append(np.ones_like(dense))
        weights = (self.weights * self.accepted[:, None]).ravel()
        shape = (len(tokens), weights.size)
        return ScoreLaw(
            tokens=tokens,
            weights=weights,
            density=np.reshape(density, shape),
            loses=np.reshape(loses, shape),
        )

    def accept_probs(self, candidate_ids: TokenTuple) -> dict[int, float]:
        """pi(x | candidates): probability that each distinct independent candidate is accepted."""
        return self.score_law(tuple(sorted(set(candidate_ids)))).winner_probs(candidate_ids)


def _break_points(scores: Rearrangement) -> Float64[np.ndarray, " points"]:
    inner = scores.edges[1:-1]
    partners = [
        scores.nearest_below(inner, np.full(inner.size, is_right)) for is_right in (False, True)
    ]
    return np.unique(np.concatenate([scores.edges, scores.peaks, *partners]))


def _smooth_pieces(
    scores: Rearrangement, points: Float64[np.ndarray, " points"]
) -> tuple[
    Float64[np.ndarray, " pieces"],
    Float64[np.ndarray, " pieces"],
    Float64[np.ndarray, "pieces nodes"],
]:
    """Starts, lengths and m at the nodes of pieces on which the quadrature has converged.

    Where an excursion of E ends just below a peak, m is analytic but almost has a square root near
    the end of the piece; such pieces are halved until halving changes the integral of m no more.
    """
    starts, lengths = points[:-1], np.diff(points)
    swap = _swap_probs(scores, starts, lengths)
    done: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while starts.size:
        half_starts = np.concatenate([starts, starts + 0.5 * lengths])
        half_lengths = np.concatenate([0.5 * lengths, 0.5 * lengths])
        halves = _swap_probs(scores, half_starts, half_lengths)
        refined = (halves @ _WEIGHTS).reshape(2, -1).mean(axis=0)
        is_open = lengths * np.abs(refined - swap @ _WEIGHTS) > PIECE_TOLERANCE
        done.append((starts[~is_open], lengths[~is_open], swap[~is_open]))
        both = np.concatenate([is_open, is_open])
        starts, lengths, swap = half_starts[both], half_lengths[both], halves[both]
    starts, lengths, swap = (np.concatenate(parts) for parts in zip(*done, strict=True))
    order = np.argsort(starts, kind="stable")
    return starts[order], lengths[order], swap[order]


def _swap_probs(
    scores: Rearrangement,
    starts: Float64[np.ndarray, " pieces"],
    lengths: Float64[np.ndarray, " pieces"],
) -> Float64[np.ndarray, "pieces nodes"]:
    u = (starts[:, None] + lengths[:, None] * _PLACES).ravel()
    return scores.swap_probs(u, scores.partners(u)).reshape(starts.size, -1)
