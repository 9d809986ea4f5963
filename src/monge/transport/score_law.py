"""Who wins when every candidate draws a score.

The law of the winner given the tuple, from tables at quadrature nodes.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from jaxtyping import Float64
from numpy.polynomial import legendre

from monge.transport.candidates import TokenTuple

NUM_NODES: Final = 20
"""Gauss-Legendre nodes per piece where the integrand is analytic but no polynomial.

Rounding, on a piece without a near-by singularity.
"""


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


@cache
def unit_nodes(
    num_nodes: int,
) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
    """Gauss-Legendre nodes and weights on [0, 1].

    Exact for polynomials of degree 2 * num_nodes - 1.
    """
    nodes, weights = legendre.leggauss(num_nodes)
    return (nodes + 1.0) / 2.0, weights / 2.0


@cache
def running_integral(num_nodes: int) -> Float64[np.ndarray, "nodes nodes"]:
    """The matrix that takes values at the unit nodes to integrals from 0 to each node.

    Exact up to degree num_nodes - 1.
    """
    nodes, weights = legendre.leggauss(num_nodes)
    degrees = np.arange(num_nodes)
    values = legendre.legvander(nodes, num_nodes)
    coefficients = (2 * degrees + 1)[:, None] / 2.0 * values[:, :num_nodes].T * weights
    integrals = np.empty((num_nodes, num_nodes))
    integrals[:, 0] = nodes + 1.0
    # The integral of P_n from -1 is (P_{n+1} - P_{n-1}) / (2n + 1).
    integrals[:, 1:] = (values[:, 2:] - values[:, : num_nodes - 1]) / (2 * degrees[1:] + 1)
    return integrals @ coefficients / 2.0
