"""Positions and attention masks of the tree nodes that one forward reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from monge.laws.levels import LevelShape
from monge.laws.tree import FutureTree
from monge.networks.base import NodeBlock

_BAND: Final = 512  # smallest width for which a chain's mask is kept


class UncommittedNodes:
    """The nodes of a sequence that were read and not yet committed, in reading order."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self._parents: list[int] = []
        self.is_chain = True

    def __len__(self) -> int:
        return len(self.depths)

    def add(self, block: NodeBlock) -> None:
        """Append a block's nodes."""
        for parent in block.parents:
            self.is_chain = self.is_chain and parent == len(self.depths) - 1
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            self._parents.append(parent)

    def visible(self, first: int) -> NDArray[np.bool_]:
        """Return which slots the nodes from slot `first` on see, `[nodes, slots]`.

        A node sees itself and its ancestors.
        """
        total = len(self.depths)
        mask = np.eye(total, dtype=np.bool_)
        for slot, parent in enumerate(self._parents):
            if parent >= 0:
                mask[slot] |= mask[parent]
        return mask[first:]

    def clear(self) -> None:
        """Forget all nodes."""
        self.depths.clear()
        self._parents.clear()
        self.is_chain = True


@lru_cache(maxsize=64)
def level_blocks(shape: LevelShape) -> tuple[NodeBlock, ...]:
    """Blocks of the levels of trees that are read; their tokens are known to a device only."""
    levels = range(len(shape.widths) - 1)
    return tuple(NodeBlock((0,) * shape.sizes[level], shape.parents(level)) for level in levels)


def forward_inputs(
    lengths: Sequence[int],
    nodes: Sequence[UncommittedNodes],
    blocks: Sequence[NodeBlock],
    width: int,
) -> tuple[
    Int64[Tensor, "batch nodes"], Int64[Tensor, "batch nodes"], Bool[Tensor, "batch nodes seq"]
]:
    """Token ids, positions and visibility of the blocks' nodes, padded to a common shape.

    Returns:
        Token ids and positions, 0 for padding and for what a device draws. Visibility over the
        columns of the cache, up to the end of the widest row. Padding sees its own column, since a
        query that sees nothing has no attention weights.
    """
    if len(blocks) == 1 and nodes[0].is_chain and len(blocks[0].parents) == width:
        tokens, start = blocks[0].tokens, lengths[0] + len(nodes[0]) - width
        if not isinstance(tokens, FutureTree):
            chain = torch.tensor([tokens]), run_of(start, width)[None]
            return *chain, chain_visibility(width, start)
    counts = np.array([len(block.parents) for block in blocks])
    ends = np.array(lengths) + [len(row) for row in nodes]
    starts, slots = (ends - counts)[:, None], np.arange(width)
    is_node = slots < counts[:, None]
    token_ids = np.zeros((len(blocks), width), dtype=np.int64)
    # As for chains: a node lies behind all that it sees. Padding writes behind the nodes.
    positions = np.where(is_node, starts + slots, 0)
    columns = np.arange(starts.max() + width)
    visible = columns <= (starts + slots)[:, :, None]
    for row, (length, uncommitted, block) in enumerate(zip(lengths, nodes, blocks, strict=True)):
        count, total = len(block.parents), len(uncommitted)
        if isinstance(block.tokens, FutureTree):
            token_ids[row, 0] = block.tokens.root
        else:
            token_ids[row, :count] = block.tokens
        if not uncommitted.is_chain:
            positions[row, :count] = length + np.array(uncommitted.depths[total - count :])
            visible[row, :count, length:] = False
            visible[row, :count, length : length + total] = uncommitted.visible(total - count)
    return torch.from_numpy(token_ids), torch.from_numpy(positions), torch.from_numpy(visible)


def write_drawn_ids(token_ids: Int64[Tensor, "batch nodes"], blocks: Sequence[NodeBlock]) -> None:
    """Write the tokens that a device draws among the token ids there, in place."""
    groups: dict[int, dict[int, Tensor]] = {}
    for row, block in enumerate(blocks):
        if isinstance(block.tokens, FutureTree):
            groups.setdefault(len(block.parents), {})[row] = block.tokens.drawn_ids
    for size, drawn in groups.items():
        rows = torch.tensor([*drawn]).to(token_ids.device, non_blocking=True)
        token_ids[rows, 1:size] = torch.stack([*drawn.values()]).clamp_min(0)


def chain_visibility(count: int, start: int) -> Bool[Tensor, "one nodes seq"]:
    """Visibility of a chain whose first node lies in column `start`: all columns before each node.

    Chains of the same length see windows onto the same matrix, which is cached.
    """
    capacity = max(_BAND, 1 << start.bit_length())
    return _band(count, capacity)[None, :, capacity - start : capacity + count]


@lru_cache(maxsize=1024)
def run_of(start: int, count: int) -> Int64[Tensor, " nodes"]:
    """Return whole numbers from `start` on; kept, so they must not be changed."""
    return torch.arange(start, start + count)


@lru_cache(maxsize=64)
def _band(count: int, capacity: int) -> Bool[Tensor, "nodes seq"]:
    return torch.ones(count, capacity + count, dtype=torch.bool).tril(capacity)


def within_window(
    visible: Bool[Tensor, "batch nodes seq"],
    positions: Int64[Tensor, "batch nodes"],
    lengths: Sequence[int],
    nodes: Sequence[UncommittedNodes],
    window: int,
) -> Bool[Tensor, "batch nodes seq"]:
    """The part of `visible` with fewer than `window` positions between query and key."""
    columns = torch.arange(visible.shape[-1]).repeat(len(lengths), 1)
    for row, (length, uncommitted) in enumerate(zip(lengths, nodes, strict=True)):
        # A committed column is its position; an uncommitted one has the position of its depth.
        depths = torch.tensor(uncommitted.depths, dtype=torch.int64)
        columns[row, length : length + len(uncommitted)] = depths + length
    return visible & (positions[:, :, None] - columns[:, None, :] < window)


@dataclass(frozen=True, slots=True)
class MaskFormat:
    """The form in which a network's attention takes its masks.

    Args:
        windows: Sliding window of every kind of layer, `None` where it sees all.
        attention: Name of the attention that runs.
        dtype: Type of the network's numbers.
        device: Device of the network.
    """

    windows: Mapping[str, int | None]
    attention: str
    dtype: torch.dtype
    device: torch.device

    @property
    def mask_dtype(self) -> torch.dtype:
        """`torch.bool`, or the float type of an additive mask."""
        return self.dtype if self.attention == "eager" else torch.bool

    def masks(
        self,
        visible: Bool[Tensor, "batch nodes seq"],
        positions: Int64[Tensor, "batch nodes"],
        lengths: Sequence[int],
        nodes: Sequence[UncommittedNodes],
    ) -> dict[str, Any]:
        """Return the mask of every kind of layer; the arguments are those of `within_window`."""
        masks: dict[str, Any] = {}
        for kind, window in self.windows.items():
            seen = visible
            if window is not None:
                seen = within_window(visible, positions, lengths, nodes, window)
            masks[kind] = self._formed(seen.to(self.device, non_blocking=True)[:, None])
        return masks

    def _formed(self, seen: Bool[Tensor, "batch one nodes seq"]) -> Any:
        if self.attention == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            rows = seen[:, 0]  # indexed by tensors alone: torch 2.9 takes no number among them here
            batch, num_nodes, num_columns = rows.shape
            # The mask is captured data: a new tree changes numbers, not code.
            return create_block_mask(
                lambda row, head, query, key: rows[row, query, key],
                batch,
                None,
                num_nodes,
                num_columns,
                device=seen.device,
            )
        return in_numbers(seen, self.mask_dtype)


def masks_behind(
    lengths: Tensor,
    columns: Tensor,
    windows: Sequence[int | None],
    dtype: torch.dtype = torch.bool,
) -> list[Tensor]:
    """Return which columns the next token of every row sees, `[rows, 1, 1, columns]`, for every kind of layer.

    Args:
        lengths: Columns of the rows.
        columns: All columns.
        windows: Sliding window of every kind, `None` where it sees all.
        dtype: Type of the masks; float types are added to scores.
    """
    places, masks = lengths[:, None], list[Tensor]()
    for window in windows:
        seen = columns <= places
        if window is not None:
            seen = seen & (places - columns < window)
        masks.append(in_numbers(seen[:, None, None], dtype))
    return masks


def in_numbers(seen: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Tensor:
    """Return a mask as attention of a type of masks takes it: float types are added to scores."""
    if dtype == torch.bool:
        return seen
    shown = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, shown, torch.finfo(dtype).min)


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device, pad: int = 0
) -> tuple[Int64[Tensor, "rows seq"], Int64[Tensor, "rows seq"]]:
    """Return token ids and attention mask as transformers wants rows of different length."""
    token_ids = [torch.tensor(row, device=device) for row in rows]
    masks = [torch.ones_like(row) for row in token_ids]
    return (
        pad_sequence(token_ids, batch_first=True, padding_value=pad, padding_side="left"),
        pad_sequence(masks, batch_first=True, padding_side="left"),
    )
