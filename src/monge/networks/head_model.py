"""A head that attends to what it has read: its cache, its masks and its forwards, beside a target."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.laws.levels import (
    DrawnLevels,
    DrawnTrees,
    LevelDraws,
    RootDraws,
    draw_levels,
)
from monge.networks.attention_masks import MaskFormat, chain_visibility, level_blocks, run_of
from monge.networks.base import CachedStep, ModuleForward, NodeBlock
from monge.networks.tree_cache import CAPTURED_ROOM, TreeCache

StepInputs = tuple[
    Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Sequence[Tensor], Sequence[Tensor]
]
"""The arguments of a `CachedStep`."""
DrawChains = Callable[[LevelDraws, Tensor, Sequence[int], Sequence[Tensor]], DrawnLevels | None]
"""Draws chains from the head's states at the roots, lengths, keys and values; `None` for other trees."""


class CachedHead:
    """See `networks.base.HeadModel`.

    Positions count from the first token that the head reads: rotary embeddings depend on differences
    of positions only.

    Args:
        read: Runs the step on committed tokens and the target's states.
        extend: Runs the step on drafted tokens and the head's own states.
        step: The step, for the shapes of its cache and its windows.
        like: A tensor of the type of keys and values, on the head's device.
        draw: Draws whole chains on a device; `None` if they are drawn level by level.
    """

    def __init__(
        self,
        read: ModuleForward,
        extend: ModuleForward,
        step: CachedStep,
        like: Tensor,
        draw: DrawChains | None = None,
    ) -> None:
        self._read, self._extend, self._device = read, extend, like.device
        self._draw = draw
        windows = {str(window): window for window in step.windows}
        self._form = MaskFormat(windows, "sdpa", like.dtype, like.device)
        # A device captures graphs for the memory of the cache.
        room = {} if like.is_cpu else CAPTURED_ROOM
        self._cache = TreeCache(len(step.cache_shapes) // 2, like.device, **room)
        self._cache.lay_out(step.cache_shapes, like.dtype)

    def open(self, sequence: int) -> None:
        self._cache.open(sequence)

    def read(
        self, blocks: Mapping[int, NodeBlock], states: Float[Tensor, "nodes width"]
    ) -> tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "sequences vocab"]]:
        hidden, logits = self._run(self._read, blocks, states, only_last=True)
        for sequence, block in blocks.items():
            row = self._cache.row(sequence)
            row.length += len(block.token_ids)
            row.nodes.clear()
        return hidden, logits

    def extend(
        self, blocks: Mapping[int, NodeBlock], states: Float[Tensor, "nodes width"]
    ) -> tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "nodes vocab"]]:
        return self._run(self._extend, blocks, states, only_last=False)

    def draw_trees(
        self, draws: RootDraws, states: Mapping[int, Float[Tensor, "one hidden"]]
    ) -> DrawnTrees:
        cache, shape = self._cache, draws.shape
        where = cache.together(draws.logits)
        rows = cache.rows_in(where)
        requests = [row.sequence for row in rows]
        above = torch.stack([states[request] for request in requests])

        def read(token_ids: Tensor, level: int) -> Tensor:
            nonlocal above
            given = above.repeat_interleave(shape.widths[level], 1).flatten(0, 1)
            blocks = dict.fromkeys(requests, level_blocks(shape)[level])
            hidden, scores = self._run(
                self._extend, blocks, given, only_last=False, token_ids=token_ids
            )
            above = hidden.unflatten(0, token_ids.shape)
            return scores.unflatten(0, token_ids.shape)

        with torch.inference_mode():
            given = draws.rows(requests)
            drawn, lengths = None, [row.length for row in rows]
            if self._draw is not None:
                cache.place(where, lengths, len(shape.widths))
                drawn = self._draw(given, above, lengths, cache.kept())
            if drawn is None:
                drawn = draw_levels(given, read)
            return DrawnTrees(requests, drawn, draws.draft_ids)

    def drop(self, sequence: int) -> None:
        self._cache.row(sequence).nodes.clear()

    def close(self, sequence: int) -> None:
        with torch.inference_mode():  # in which the cache grew, so that it may be written
            self._cache.close(sequence)
            # On a device, graphs are captured for this memory.
            if not self._cache.num_open and self._device.type == "cpu":
                self._cache.give_back()

    def _run(
        self,
        run: ModuleForward,
        blocks: Mapping[int, NodeBlock],
        states: Tensor,
        *,
        only_last: bool,
        token_ids: Int64[Tensor, "batch nodes"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step on blocks; their tokens are those on the device, row by row, where they are given."""
        cache = self._cache
        ids, positions, masks = cache.add(blocks, self._form)
        batch, width = positions.shape
        counts = [len(block.parents) for block in blocks.values()]
        # Rows lie in the order of the cache, and blocks in the order of the requests.
        firsts = [(cache.index(sequence) - cache.rows.start) * width for sequence in blocks]
        is_dense = batch * width == sum(counts) and firsts == sorted(firsts)
        shown = all_nodes = (
            run_of(0, batch * width)
            if is_dense
            else torch.cat([run_of(*span) for span in zip(firsts, counts, strict=True)])
        ).to(self._device, non_blocking=True)
        if only_last:
            ends = [first + count - 1 for first, count in zip(firsts, counts, strict=True)]
            shown = torch.tensor(ends).to(self._device, non_blocking=True)
        if not is_dense:
            padded = states.new_zeros(batch * width, states.shape[1])
            padded[all_nodes] = states
            states = padded
        with torch.inference_mode():
            hidden, logits = run(
                ids if token_ids is None else token_ids,
                states.unflatten(0, (batch, width)),
                (positions, cache.columns(width), shown),
                [*masks.values()],
                cache.kept(),
            )
            hidden = hidden.flatten(0, 1)
            return (hidden if is_dense else hidden[all_nodes]), logits


def step_inputs(step: CachedStep, like: Tensor, batch: int, nodes: int, logits: int) -> StepInputs:
    """Return inputs of a step with artificial numbers, no two rows alike; sizes all differ where `batch` is 2.

    Args:
        step: The step.
        like: A tensor of the type of the step's numbers.
        batch: Number of texts.
        nodes: Nodes of each.
        logits: Nodes with logits.
    """

    def wave(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return (2 * torch.sin(1.3 * torch.arange(count, dtype=torch.float64))).view(shape).to(like)

    capacity, device = 16, like.device
    columns = torch.arange(8, 8 + nodes).repeat(batch, 1).to(device)
    return (
        torch.arange(batch * nodes).view(batch, nodes).to(device),
        wave(batch, nodes, step.width),
        (columns, columns.clone(), (torch.arange(logits) % (batch * nodes)).to(device)),
        [chain_visibility(nodes, 8)[None].repeat(batch, 1, 1, 1).to(device) for _ in step.windows],
        [wave(batch, heads, capacity, dim) for heads, dim in step.cache_shapes],
    )
