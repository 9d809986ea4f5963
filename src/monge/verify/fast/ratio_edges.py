"""The optimal rule without a sort.

Tokens are spread over a grid of ratios, and the edges of the grid lie on the line.

p = target law, q = draft law, K = number of draws, 0 = e_0 < .. < e_n a grid whose last edge is
above K, r = min(p/q, e_n). A token with r between e_j and e_(j+1) stands for edge j + 1 with
probability theta = (r - e_j) / (e_(j+1) - e_j), else for edge j. So edges are drawn with masses Q,
the sums of these shares, and the line is that of the target e Q. Edge e receives Q_e g_e, g_e <= e,
hence token y

    a(y) = q(y) [ (1 - theta) g_j + theta g_(j+1) ] <= q(y) r(y) <= p(y) ,

and with the residual p - a the output law is p whatever the grid. Ratios above K need no edges of
their own, since mu <= K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.draws import Draws
from monge.verify.fast.one_node import NodeLine

OFFSET: Final = 2.0**-12
"""The grid is that of the floats above this number, moved to zero.

Linear below it, geometric in pieces above.
"""

MANTISSA: Final = 52


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeLine:
    """The line of the edges of one node.

    Args:
        line: Line of the edges: draft masses Q, target masses e Q.
        cells: j of each token, `[support]`.
        shares: theta of each token, `[support]`.
        gains: g of each edge, `[edges]`.
        q: Draft masses, `[support]`.
    """

    line: NodeLine
    cells: Int64[np.ndarray, " support"]
    shares: Float64[np.ndarray, " support"]
    gains: Float64[np.ndarray, " edges"]
    q: Float64[np.ndarray, " support"]

    @classmethod
    def build(
        cls,
        p: Float64[np.ndarray, " support"],
        q: Float64[np.ndarray, " support"],
        width: int,
        bins: int,
    ) -> "EdgeLine":
        """The line, from masses on the support of q or on more.

        Args:
            p: Target masses.
            q: Draft masses, summing to one.
            width: K.
            bins: Cells of each octave of ratios, a power of two.
        """
        edges, cells, shares = _grid(p, q, width, bins)
        upper = q * shares
        drawn = np.bincount(cells, q - upper, edges.size) + np.bincount(
            cells + 1, upper, edges.size
        )
        drawn /= drawn.sum()
        line = NodeLine.build(edges * drawn, drawn, width)
        gains = np.divide(line.masses, drawn, out=np.zeros_like(drawn), where=drawn > 0.0)
        return cls(line=line, cells=cells, shares=shares, gains=gains, q=q)

    def winner(self, candidates: Sequence[int], draws: Draws) -> int | None:
        """Index of the accepted draw, from two uniforms a draw.

        Candidates are support columns, -1 for tokens outside.
        """
        scores = [self._score(column, draws.uniform(), draws.uniform()) for column in candidates]
        best = max(range(len(scores)), key=scores.__getitem__)
        return best if scores[best] > self.line.floor else None

    @property
    def masses(self) -> Float64[np.ndarray, " support"]:
        """What the rule accepts of each token."""
        lower = self.gains[self.cells]
        return self.q * (lower + self.shares * (self.gains[self.cells + 1] - lower))

    def stands_for(self, column: int, position: float) -> tuple[int, float]:
        """Edge of a drawn token, and the position in its window: one uniform for both."""
        cell, share = int(self.cells[column]), float(self.shares[column])
        return (
            (cell + 1, position / share)
            if position < share
            else (cell, (position - share) / (1.0 - share))
        )

    def _score(self, column: int, position: float, swap: float) -> float:
        if column < 0:
            return 0.0
        edge, rest = self.stands_for(column, position)
        return self.line.score(edge, rest, swap)


def _grid(
    p: Float64[np.ndarray, " support"], q: Float64[np.ndarray, " support"], width: int, bins: int
) -> tuple[
    Float64[np.ndarray, " edges"], Int64[np.ndarray, " support"], Float64[np.ndarray, " support"]
]:
    """Edges, and cell and share of each token: the leading and the trailing bits of its ratio."""
    shift = MANTISSA - (bins.bit_length() - 1)
    ratios = np.divide(p, q, out=np.zeros_like(q), where=q > 0.0)
    first = int(np.float64(OFFSET).view(np.int64)) >> shift
    last = int(np.float64(width + OFFSET).view(np.int64)) >> shift
    grid = (np.arange(first, last + 3) << shift).view(np.float64)
    bits = np.minimum(ratios + OFFSET, grid[-2]).view(np.int64)
    return (
        grid - OFFSET,
        (bits >> shift) - first,
        np.ldexp((bits & ((1 << shift) - 1)).astype(np.float64), -shift),
    )
