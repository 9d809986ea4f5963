"""Where the new nodes of several texts lie in a head's KV cache, and what they see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """New nodes of a batch of texts, padded to the same number per text.

    Args:
        positions: Their positions.
        columns: Columns of the cache that they are written to.
        masks: Columns that every node sees, for every size of a sliding window; `None` is full attention.
        kept: Keys and values, layer by layer, keys first; written in place.
    """

    positions: Int64[Tensor, "batch nodes"]
    columns: Int64[Tensor, "batch nodes"]
    masks: Mapping[int | None, Bool[Tensor, "batch one nodes seq"]]
    kept: Sequence[Float[Tensor, "batch _ capacity _"]]

    def write(
        self,
        layer: int,
        keys: Float[Tensor, "all_nodes heads key"],
        values: Float[Tensor, "all_nodes heads value"],
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the nodes, and return those of all columns, `[batch, heads, capacity, dim]`."""
        shape = self.positions.shape
        rows = torch.arange(shape[0], device=self.columns.device)[:, None]
        for memory, new in zip(self.kept[2 * layer : 2 * layer + 2], (keys, values), strict=True):
            memory[rows, :, self.columns] = new.unflatten(0, shape)
        return self.kept[2 * layer], self.kept[2 * layer + 1]
