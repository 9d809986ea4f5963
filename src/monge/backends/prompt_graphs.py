"""Short prompts by CUDA graphs: to launch a network's layers takes longer than the GPU computes."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from monge.networks.attention_masks import masks_behind
from monge.networks.forward import ForwardOutput, ForwardSpec
from monge.networks.tree_cache import TreeCache, power_of_two

MOST_TOKENS: Final = 512
"""Tokens of all rows that are read together, padding included: with more, arithmetic takes longer than launches."""
_LEAST: Final = 32
"""Smallest length that is captured, for fewer graphs."""

Outputs = tuple[Tensor, ...]
ReadTokens = Callable[
    [Tensor, tuple[Tensor, Tensor, Tensor], Sequence[Tensor], list[Tensor]], Outputs
]
"""The forward of `TracedForward`."""


class PromptGraphs:
    """Prefills new texts: a CUDA graph for each number of texts and of tokens, both powers of two.

    Keys and values are written beside the cache and copied into it, so graphs stay valid when the
    cache moves. All graphs write to the same memory.

    Args:
        capture: Captures work that always uses the same memory; see `backends.cuda.Capture`.
        read: Reads nodes.
        spec: Shapes and types of its inputs.
    """

    def __init__(
        self,
        capture: Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]],
        read: ReadTokens,
        spec: ForwardSpec,
    ) -> None:
        self._capture, self._read, self._spec = capture, read, spec
        self._memory = list[Tensor]()
        self._graphs: dict[tuple[int, int], tuple[Tensor, Callable[[], None], Outputs, object]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def prepare(self, num_rows: int, device: torch.device) -> None:
        """Capture the graphs of every number of texts up to `num_rows`."""
        for power in range(num_rows.bit_length()):
            width = MOST_TOKENS >> power
            while width >= _LEAST:
                self._graph(1 << power, width, device)
                width //= 2

    def read(self, token_ids: Tensor, cache: TreeCache) -> ForwardOutput | None:
        """Prefill new texts; `None` if a text has cached tokens, or if no graph is that large.

        Args:
            token_ids: Their tokens, `[rows, tokens]`.
            cache: The cache, placed.
        """
        rows, size = token_ids.shape
        shape = power_of_two(rows), max(_LEAST, power_of_two(size))
        if any(cache.starts) or shape[0] * shape[1] > MOST_TOKENS:
            return None
        static_ids, replay, (logits, *states), _ = self._graph(*shape, token_ids.device)
        static_ids[:rows, :size] = token_ids
        replay()
        for kept, written in zip(cache.kept(), self._written(shape), strict=True):
            kept[:, :, :size] = written[:rows, :, :size]
        return ForwardOutput(
            logits=logits[:rows].clone(),
            states=tuple(state[:rows, :size].clone() for state in states),
        )

    def _graph(
        self, rows: int, width: int, device: torch.device
    ) -> tuple[Tensor, Callable[[], None], Outputs, object]:
        if (rows, width) not in self._graphs:
            if not self._memory:
                self._memory = [
                    torch.zeros(heads * MOST_TOKENS * size, dtype=self._spec.dtype, device=device)
                    for heads, size in self._spec.cache_shapes
                ]
            static_ids = torch.zeros(rows, width, dtype=torch.int64, device=device)
            columns = torch.arange(width, device=device)
            places = columns.repeat(rows, 1), columns.repeat(rows, 1), columns[:1].clone()
            # A text is read as its nodes would be, each behind the columns before it.
            spec = self._spec
            masks = [
                mask[:, 0, 0].expand(rows, 1, width, width).clone()
                for mask in masks_behind(columns, columns, spec.windows, spec.mask_dtype)
            ]
            kept = self._written((rows, width))
            replay, outputs = self._capture(lambda: self._read(static_ids, places, masks, kept))
            self._graphs[rows, width] = static_ids, replay, outputs, (places, masks)
        return self._graphs[rows, width]

    def _written(self, shape: tuple[int, int]) -> list[Tensor]:
        """Keys and values of a number of texts and of tokens."""
        rows, width = shape
        return [
            memory[: rows * heads * width * size].view(rows, heads, width, size)
            for memory, (heads, size) in zip(self._memory, self._spec.cache_shapes, strict=True)
        ]
