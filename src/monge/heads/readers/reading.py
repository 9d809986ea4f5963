"""A head's KV cache of one text, with positions and ancestors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from monge.core.model import NodeBlock

_COLUMNS: Final = 256  # columns are added in steps, so that a growing text rarely moves the memory


class KeyValues:
    """Keys and values of one layer, `[heads, columns, dim]`.

    Tokens are appended and truncated at the end.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(
        self, keys: Float[Tensor, "nodes heads key"], values: Float[Tensor, "nodes heads value"]
    ) -> tuple[Tensor, Tensor]:
        """Append and return the whole cache, `[heads, columns, dim]`."""
        end = self.length + len(keys)
        self._keys, self._values = (
            self._grown(self._keys, keys, end),
            self._grown(self._values, values, end),
        )
        self._keys[:, self.length : end] = keys.transpose(0, 1)
        self._values[:, self.length : end] = values.transpose(0, 1)
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def _grown(self, kept: Tensor | None, new: Tensor, end: int) -> Tensor:
        if kept is not None and kept.shape[1] >= end:
            return kept
        columns = -(-max(end, self.length * 5 // 4) // _COLUMNS) * _COLUMNS
        grown = new.new_empty(new.shape[1], columns, new.shape[2])
        if kept is not None:
            grown[:, : self.length] = kept[:, : self.length]
        return grown


@dataclass(frozen=True, slots=True)
class Segment:
    """The new nodes of one text in a batched forward.

    Args:
        layers: The text's KV cache by layer.
        positions: Positions of the new nodes.
        columns: Positions of all cached tokens, including the new nodes.
        visible: Columns that each new node attends to, including itself.
    """

    layers: Sequence[KeyValues]
    positions: Int64[Tensor, " nodes"]
    columns: Int64[Tensor, " seq"]
    visible: Bool[Tensor, "nodes seq"]


class Reading:
    """The cache of one text: committed tokens, then drafted nodes until `drop`.

    Args:
        num_layers: Number of layers with a KV cache.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = tuple(KeyValues() for _ in range(num_layers))
        self._committed: list[int] = []
        self._ancestors: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._committed)

    def read(self, positions: Sequence[int]) -> Segment:
        """Commit a run of tokens at these positions."""
        before, count = len(self._committed), len(positions)
        self._committed.extend(positions)
        visible = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        return Segment(self.layers, torch.tensor(positions), torch.tensor(self._committed), visible)

    def extend(self, block: NodeBlock) -> Segment:
        """Add drafted nodes; those without a parent follow the committed text."""
        before, first = len(self._committed), len(self._ancestors)
        for slot, parent in enumerate(block.parents, start=first):
            self._ancestors.append((*(() if parent < 0 else self._ancestors[parent]), slot))
        end = self._committed[-1] if self._committed else -1
        positions = [end + len(above) for above in self._ancestors]
        visible = torch.zeros(len(block.parents), before + len(self._ancestors), dtype=torch.bool)
        visible[:, :before] = True
        for row, above in enumerate(self._ancestors[first:]):
            visible[row, [before + slot for slot in above]] = True
        columns = torch.tensor([*self._committed, *positions])
        return Segment(self.layers, torch.tensor(positions[first:]), columns, visible)

    def drop(self) -> None:
        """Remove the drafted nodes."""
        self._ancestors.clear()
        for layer in self.layers:
            layer.length = min(layer.length, len(self._committed))
