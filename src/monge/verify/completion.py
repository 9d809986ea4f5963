"""Completion: the law of the token after a rejection, given what is accepted of every token in all.

p = target law. A rule that accepts token i with mass y_i <= p_i in all, and otherwise emits from p
- y, has the output law p, whatever y is: the two masses that are missing are one and the same, 1 -
sum(y).
"""

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.law import DenseLaw, Law, sparse_part, trusted_law


def below(
    p: Law,
    token_ids: Int64[Tensor, " support"],
    masses: Float64[Tensor, " support"],
    scale: float = 1.0,
) -> Law:
    """Normalised `s p - y`, where y has the given masses and is zero elsewhere.

    P itself where all of s p is accepted.

    Args:
        p: Target law.
        token_ids: Increasing token ids.
        masses: y, at most s p.
        scale: s.
    """
    if isinstance(p, DenseLaw):
        rest = scale * p.probs
        # Y <= s p, but for the rounding of its sums.
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
