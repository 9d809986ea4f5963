"""The excess of a scaled law over another one: what a rejection leaves.

p = target law, q = draft law.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.law import DenseLaw, Law, residual, sparse_part, trusted_law


@dataclass(frozen=True)
class Excess:
    """`(scale p - q)_+`. Its mass and its law are computed on demand.

    Args:
        scale: In (0, 1].
        p: Target law.
        q: Draft law.
    """

    scale: float
    p: Law
    q: Law

    @cached_property
    def mass(self) -> float:
        """Its mass."""
        p, q = self.p, self.q
        if isinstance(p, DenseLaw) and isinstance(q, DenseLaw):
            return float(self._difference(p, q).sum())
        if isinstance(p, DenseLaw):
            part = q.sparse()  # of a few tokens: what they take of p is missing from its mass
            taken = (self.scale * p.at(part.token_ids)).minimum(part.probs)
            return max(0.0, self.scale - float(taken.sum()))
        part = p.sparse()
        return float((self.scale * part.probs - q.at(part.token_ids)).clamp_min(0.0).sum())

    @property
    def law(self) -> Law:
        """Its normalised law; p if there is no mass."""
        p, q = self.p, self.q
        if self.scale == 1.0:
            return residual(p, q)
        if isinstance(p, DenseLaw) and isinstance(q, DenseLaw):
            left = self._difference(p, q)
            total = left.sum()
            return trusted_law(left.div_(total)) if float(total) > 0.0 else p
        part = q.sparse()
        return below(p, part.token_ids, part.probs, self.scale)

    def _difference(self, p: DenseLaw, q: DenseLaw) -> Float64[Tensor, " vocab"]:
        left = p.probs - q.probs if self.scale == 1.0 else self.scale * p.probs - q.probs
        return left.clamp_min_(0.0)


def below(
    p: Law,
    token_ids: Int64[Tensor, " support"],
    masses: Float64[Tensor, " support"],
    scale: float = 1.0,
) -> Law:
    """Normalised `s p - y`, the law of the token after a rejection; p itself if all of s p is accepted.

    A rule that accepts token i with mass y_i <= p_i in all, and otherwise emits from p - y, has the
    output law p, whatever y is: the two masses that are missing are the same, 1 - sum(y).

    Args:
        p: Target law.
        token_ids: Increasing token ids, `[support]`.
        masses: y of these tokens, at most s p; y is zero elsewhere, `[support]`.
        scale: s.
    """
    if isinstance(p, DenseLaw):
        rest = scale * p.probs
        # y <= s p, but for the rounding of its sums.
        rest[token_ids] = (rest[token_ids] - masses).clamp_min(0.0)
        total = rest.sum()
        # Where nothing is left, nothing is ever rejected: rounding alone brings a caller here.
        return trusted_law(rest / total) if float(total) > 0.0 else p
    part = p.sparse()
    index = torch.searchsorted(token_ids, part.token_ids).clamp_max(token_ids.numel() - 1)
    taken = torch.where(token_ids[index] == part.token_ids, masses[index], 0.0)
    left = (scale * part.probs - taken).clamp_min(0.0)
    (kept,) = (left > 0.0).nonzero(as_tuple=True)
    return sparse_part(part.token_ids[kept], left[kept] / left.sum()) if kept.numel() else p
