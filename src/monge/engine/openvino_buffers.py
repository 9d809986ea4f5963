"""Memory that an OpenVINO step shares with the runtime."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from monge.engine.step import StepSpec

_HIDDEN: Final = np.finfo(np.float32).min
_SHOWN: Final = np.float32(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What a step reads and writes, shared with the runtime, for one number of rows, nodes and past columns."""

    token_ids: np.ndarray
    positions: np.ndarray
    masks: tuple[np.ndarray, ...]
    logits: Tensor
    states: tuple[Tensor, ...]
    new: tuple[Tensor, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def of(
        cls, spec: StepSpec, sizes: tuple[int, int, int], widths: tuple[int, int], shared: Callable[[np.ndarray], Any]
    ) -> "Buffers":
        """Empty ones.

        Args:
            spec: What the step reads and gives.
            sizes: Rows, nodes and past columns.
            widths: Those of logits and of a hidden state.
            shared: Makes the runtime's view of memory.
        """
        rows, nodes, past = sizes
        ids, positions = np.zeros((rows, nodes), dtype=np.int64), np.zeros((rows, nodes), dtype=np.int64)
        masks = tuple(np.zeros((rows, 1, nodes, past + nodes), dtype=np.float32) for _ in spec.kinds)
        logits = torch.zeros(rows, nodes, widths[0])
        states = tuple(torch.zeros(rows, nodes, widths[1]) for _ in spec.layers)
        counts = Counter(spec.cache_shapes)
        new = tuple(torch.zeros(count, rows, heads, nodes, size) for (heads, size), count in counts.items())
        return cls(
            token_ids=ids,
            positions=positions,
            masks=masks,
            logits=logits,
            states=states,
            new=new,
            inputs=tuple(shared(array) for array in (ids, positions, *masks)),
            outputs=tuple(shared(tensor.numpy()) for tensor in (logits, *states, *new)),
        )

    def fill(self, token_ids: np.ndarray, positions: np.ndarray, masks: Sequence[np.ndarray], starts: Sequence[int]) -> None:
        """Take the inputs of a step; where there is room for more nodes, they are the last one again, which nobody sees.

        Args:
            token_ids: Tokens, `[rows, nodes]`.
            positions: Their positions.
            masks: Masks over columns of the cache, boolean or additive, `[rows, 1, nodes, seq]`.
            starts: First column that is written, row by row.
        """
        count = token_ids.shape[1]
        self.token_ids[:, :count], self.token_ids[:, count:] = token_ids, token_ids[:, -1:]
        self.positions[:, :count], self.positions[:, count:] = positions, positions[:, -1:]
        for shown, mask in zip(self.masks, masks, strict=True):
            _fill(shown, mask, starts)

    def first(self, count: int) -> "Buffers":
        """What belongs to the first nodes."""
        if count == self.logits.shape[1]:
            return self
        return replace(
            self,
            logits=self.logits[:, :count],
            states=tuple(state[:, :count] for state in self.states),
            new=tuple(tensor[:, :, :, :count] for tensor in self.new),
        )

    def fill_chain(self, token_ids: Sequence[int], start: int) -> None:
        """Take a chain behind one text, from column `start` on; its last token again where there is room for more."""
        count, nodes = len(token_ids), self.token_ids.shape[1]
        self.token_ids[0, :count] = token_ids
        self.token_ids[0, count:] = token_ids[-1]
        self.positions[0, :count] = range(start, start + count)
        self.positions[0, count:] = start + count - 1
        for shown in self.masks:
            past = shown.shape[3] - nodes
            shown[..., :start] = _SHOWN
            shown[..., start:past] = _HIDDEN
            shown[..., past:] = _below(nodes)


@lru_cache(maxsize=128)
def _below(nodes: int) -> np.ndarray:
    """The mask of a chain over its own nodes."""
    return np.where(np.tri(nodes, dtype=np.bool_), _SHOWN, _HIDDEN)


def _fill(shown: np.ndarray, seen: np.ndarray, starts: Sequence[int]) -> None:
    """A mask over columns of the cache as one over past and nodes, `[batch, 1, nodes, past + nodes]`: 0 where seen."""
    added = np.where(seen, _SHOWN, _HIDDEN) if seen.dtype == np.bool_ else seen
    count, past = seen.shape[2], shown.shape[3] - shown.shape[2]
    for row, start in enumerate(starts):
        shown[row, :, :count, :start] = added[row, :, :, :start]
        shown[row, :, :, start:past] = _HIDDEN
        shown[row, :, :count, past : past + count] = added[row, :, :, start : start + count]
        shown[row, :, :, past + count :] = _HIDDEN
        shown[row, :, count:, :start] = shown[row, :, count - 1 : count, :start]
        shown[row, :, count:, past : past + count] = shown[row, :, count - 1 : count, past : past + count]
