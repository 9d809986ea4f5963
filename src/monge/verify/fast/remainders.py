"""The token emitted where no candidate is accepted, at many nodes at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.law import DenseLaw, Law, SparseLaw


def draw_remainders(
    laws: Sequence[Law],
    token_ids: Int64[Tensor, "nodes columns"],
    left: Float64[Tensor, "nodes columns"],
    positions: Sequence[float],
) -> list[int]:
    """A token of what is left of each law.

    Given masses on some tokens, and the law itself on all others.

    Args:
        laws: p of each node.
        token_ids: Tokens whose mass is not that of p; padded beyond all tokens.
        left: What is left of them.
        positions: Where in what is left, in [0, 1), by increasing token id.
    """
    dense = [law.probs for law in laws if isinstance(law, DenseLaw)]
    if len(dense) < len(laws) or len({probs.numel() for probs in dense}) > 1:
        return [
            _remainder(law, ids, masses).quantile(position)
            for law, ids, masses, position in zip(laws, token_ids, left, positions, strict=True)
        ]
    p = torch.stack(dense)
    is_token = token_ids < p.shape[1]
    places = torch.where(is_token, token_ids, 0)
    # Padding adds nothing to token 0; a plain scatter would write its zero over what is left of it.
    rest = p.scatter_add(
        1, places, torch.where(is_token, left - p.gather(1, places), 0.0)
    ).clamp_min(0.0)
    # All of p is accepted: rounding alone brings a caller here.
    is_empty = rest.amax(1, keepdim=True) == 0.0
    sums = torch.where(is_empty, p, rest).cumsum(1)
    wanted = (
        torch.tensor(positions, dtype=torch.float64).to(p.device, non_blocking=True).unsqueeze(1)
        * sums[:, -1:]
    )
    return torch.searchsorted(sums, wanted, right=True).squeeze(1).tolist()


def _remainder(
    p: Law, token_ids: Int64[Tensor, " columns"], left: Float64[Tensor, " columns"]
) -> Law:
    part = p.sparse()
    order = token_ids.argsort()
    token_ids, left = token_ids[order], left[order]
    index = torch.searchsorted(token_ids, part.token_ids).clamp_max(token_ids.numel() - 1)
    masses = torch.where(token_ids[index] == part.token_ids, left[index], part.probs)
    kept = masses > 0.0
    return SparseLaw(part.token_ids[kept], masses[kept] / masses.sum()) if bool(kept.any()) else p
