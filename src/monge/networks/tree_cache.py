"""A key-value cache that reads trees: each sequence has a row, filled from the left.

Row r holds its committed tokens in columns 0 .. length-1, so a column is a position, and its
uncommitted nodes after them in reading order. Committing a path moves its columns together;
dropping nodes moves nothing. Rows of different length share a batch: each forward writes every row
at its own end, and the mask hides the columns after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from monge.core.errors import UnsupportedModelError
from monge.networks.attention_masks import (
    MaskFormat,
    UncommittedNodes,
    forward_inputs,
    run_of,
    write_drawn_ids,
)
from monge.networks.base import NodeBlock

_COLUMNS: Final = 64  # columns are added in steps, so that a growing text rarely moves the cache
CAPTURED_ROOM: Final[dict[str, Any]] = {"growth": 1.5, "least": 512}
"""Room of a cache for whose memory CUDA graphs are captured: every move captures them again."""


@dataclass(slots=True)
class CacheRow:
    """A sequence: its number of committed columns, and the nodes after them."""

    sequence: int
    length: int = 0
    nodes: UncommittedNodes = field(default_factory=UncommittedNodes)

    @property
    def end(self) -> int:
        """Number of filled columns."""
        return self.length + len(self.nodes)


@dataclass(slots=True, eq=False)
class _Placement:
    """Destination of the next forward; shared by all layers."""

    rows: slice = field(default_factory=lambda: slice(0, 0))
    starts: tuple[int, ...] = ()
    end: int = 0
    capacity: tuple[int, int] = (0, 0)
    settled: bool = False
    _index: tuple[Tensor, Tensor] | None = None

    def index(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return rows and columns, made by the first layer; `None` if all rows start together."""
        if self._index is None and len(set(self.starts)) > 1:
            width = self.end - max(self.starts)
            rows = torch.arange(self.rows.start, self.rows.stop, device=device)
            self._index = rows[:, None], written_columns(self.starts, width, device)
        return self._index

    def move(self, rows: slice, starts: Sequence[int], width: int) -> None:
        """Set the destination of the next forward."""
        self.rows, self.starts, self.end = rows, tuple(starts), max(starts) + width
        self._index = None


class _Layer(CacheLayerMixin):
    """Keys and values of a layer, `[rows, heads, columns, head_dim]`."""

    is_sliding = False

    def __init__(self, placement: _Placement) -> None:
        super().__init__()
        self._placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self._placement.settled:
            raise UnsupportedModelError(
                "cache: a layer keeps keys that it did not keep in the first forward; use "
                "drafter='none'"
            )
        rows, columns = self._placement.capacity
        # Zeros, not empty memory: hidden columns get weight zero, and zero times NaN is NaN.
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self._placement
        assert self.keys is not None and self.values is not None
        index = place.index(key_states.device)
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            if index is None:
                kept[place.rows, :, place.starts[0] : place.end] = new
            else:
                rows, columns = index
                # Autocast computes keys of several types.
                kept[rows, :, columns] = new.transpose(1, 2).to(kept.dtype)
        return self.keys[place.rows, :, : place.end], self.values[place.rows, :, : place.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._placement.end, 0

    def get_seq_length(self) -> int:
        # A layer that reads images keeps nothing of a text, and says so by its length.
        return max(self._placement.starts, default=0) if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The cache that is passed to the network, with the operations of the loop.

    Rows in use have no gaps between them, and a forward reads rows that lie side by side.

    Args:
        num_layers: Layers of the network that keep keys and values.
        device: Device of the index tensors of ragged writes.
        growth: Factor of room that is added if it runs out. CUDA graphs are captured again then.
        least: Columns that a cache with rows keeps, so that short texts move it seldom.
        spare: Columns after all texts, in which a CUDA graph writes the rows that it reads as
            padding; the number of rows is then a power of two.

    Attributes:
        device: See above.
        layout: Another object whenever keys and values have moved to other memory.
    """

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        *,
        growth: float = 1.25,
        least: int = 0,
        spare: int = 0,
    ) -> None:
        self._placement = _Placement()
        self._layers = [_Layer(self._placement) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))
        self.device, self._growth, self._least, self._spare = device, growth, least, spare
        self._least_rows = 0
        self._num_rows = self._num_columns = 0
        self._rows: list[CacheRow] = []
        self._index_of: dict[int, int] = {}
        # Layers of one shape share one block of memory, `[tensors, rows, heads, columns,
        # head_dim]`: moving a path is then one operation for the whole network instead of two per
        # layer.
        self._slabs: list[Tensor] = []
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self.layout = object()

    # The rows.

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self._rows)

    def row(self, sequence: int) -> CacheRow:
        """Return the row of a sequence."""
        return self._rows[self._index_of[sequence]]

    def holds(self, sequence: int) -> bool:
        """Return whether a sequence has a row."""
        return sequence in self._index_of

    def index(self, sequence: int) -> int:
        """Return where a row lies. It may move with every forward, and when a row is closed."""
        return self._index_of[sequence]

    def open(self, sequence: int) -> None:
        """Give a sequence an empty row."""
        assert sequence not in self._index_of, f"sequence {sequence} is open already"
        self._index_of[sequence] = len(self._rows)
        self._rows.append(CacheRow(sequence))

    def close(self, sequence: int) -> None:
        """Free a row. The last row moves into the gap, and its old place is cleared."""
        index, last = self._index_of.pop(sequence), self._rows.pop()
        end = len(self._rows)
        if last.sequence != sequence:
            self._rows[index], self._index_of[last.sequence] = last, index
        for slab in self._slabs:
            if last.sequence != sequence and index < self._num_rows:
                slab[:, index] = 0
                if end < self._num_rows:
                    slab[:, index, :, : last.end] = slab[:, end, :, : last.end]
            if end < self._num_rows:
                # Nothing that it held may meet a later sequence.
                slab[:, end] = 0

    def together(self, sequences: Iterable[int]) -> slice:
        """Return rows of these sequences, side by side.

        Those between them would be read as padding, a forward's width each. To move a row once is
        cheaper than that, and rows that were read together stay together.
        """
        indices = [self._index_of[sequence] for sequence in sequences]
        count, first = len(indices), min(indices)
        if max(indices) - first + 1 > count:
            wanted = set(indices)
            first = max(
                range(len(self._rows) - count + 1),
                key=lambda start: len(wanted.intersection(range(start, start + count))),
            )
            inside = range(first, first + count)
            others = (index for index in inside if index not in wanted)
            for index in indices:
                if index not in inside:
                    self._swap(index, next(others))
        return slice(first, first + count)

    def rows_in(self, where: slice) -> list[CacheRow]:
        """Return the rows that lie there."""
        return self._rows[where]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the bookkeeping contradicts itself."""
        places = {row.sequence: index for index, row in enumerate(self._rows)}
        assert places == self._index_of, f"rows lie at {places}, listed are {self._index_of}"
        assert all(row.length >= 0 for row in self._rows)

    def _swap(self, left: int, right: int) -> None:
        rows, index_of = self._rows, self._index_of
        if rows[left].end or rows[right].end:
            if max(left, right) >= self._num_rows:
                self._resize(max(left, right) + 1, self._num_columns)
            # All copies first: where memory runs out, no layer has been exchanged without the others.
            copies = [(slab[:, left].clone(), slab[:, right].clone()) for slab in self._slabs]
            for slab, (first, second) in zip(self._slabs, copies, strict=True):
                slab[:, left], slab[:, right] = second, first
        rows[left], rows[right] = rows[right], rows[left]
        index_of[rows[left].sequence], index_of[rows[right].sequence] = left, right

    # The next forward.

    def add(
        self, blocks: Mapping[int, NodeBlock], form: MaskFormat, widths: Sequence[int] = ()
    ) -> tuple[Int64[Tensor, "rows nodes"], Int64[Tensor, "rows nodes"], dict[str, Any]]:
        """Append nodes to their rows, and set where the next forward writes them.

        Args:
            blocks: The nodes by sequence.
            form: Form of the masks.
            widths: Numbers of nodes to which blocks are padded, ascending; others keep their width.

        Returns:
            Tokens, positions, and the mask of every kind of layer, on the device.
        """
        where = self.together(blocks)
        rows = self._rows[where]
        row_blocks, starts = [blocks[row.sequence] for row in rows], [row.end for row in rows]
        for row, block in zip(rows, row_blocks, strict=True):
            row.nodes.add(block)
        width = max(len(block.parents) for block in row_blocks)
        width = next((wide for wide in widths if wide >= width), width)
        lengths, nodes = [row.length for row in rows], [row.nodes for row in rows]
        ids, positions, visible = forward_inputs(lengths, nodes, row_blocks, width)
        self.place(where, starts, width)
        masks = form.masks(visible, positions, lengths, nodes)
        ids, positions = (tensor.to(self.device, non_blocking=True) for tensor in (ids, positions))
        write_drawn_ids(ids, row_blocks)
        return ids, positions, masks

    @property
    def is_settled(self) -> bool:
        """True once a first forward has shown which layers keep what."""
        return self._placement.settled

    @property
    def starts(self) -> tuple[int, ...]:
        """First column that the next forward writes, row by row."""
        return self._placement.starts

    @property
    def rows(self) -> slice:
        """Rows of the next forward."""
        return self._placement.rows

    def columns(self, width: int) -> Tensor:
        """Return the columns that the next forward writes, `[rows, width]`."""
        return written_columns(self._placement.starts, width, self.device)

    def kept(self, rows: slice | None = None) -> list[Tensor]:
        """Return keys and values of rows, by default the next forward's, layer by layer, keys first.

        A compiled forward writes into these tensors.
        """
        rows = self._placement.rows if rows is None else rows
        views = self._views.get((rows.start, rows.stop))
        if views is None:
            views = [tensor[rows] for tensor in self._tensors()]
            self._views[rows.start, rows.stop] = views
        return views

    def place(self, rows: slice, starts: Sequence[int], width: int) -> None:
        """Set where the next forward writes."""
        place = self._placement
        if not place.settled:
            # A first forward that failed half-way has laid out nothing that can be used.
            for layer in self._layers:
                layer.is_initialized = False
        end = max(starts) + width
        num_rows = max(rows.stop, len(self._rows))
        num_columns = self._spare + max(end, max((row.end for row in self._rows), default=0))
        # Some backends read every column there is: after a long text, a short one gets a short
        # cache.
        is_long = max(2 * num_columns + _COLUMNS, self.least_columns) < self._num_columns
        if num_rows > self._num_rows or num_columns > self._num_columns or is_long:
            self._resize(num_rows, num_columns)
        place.move(rows, starts, width)
        place.capacity = self._num_rows, self._num_columns

    def lay_out(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """Lay out the layers without a first forward, if they are not laid out.

        Args:
            shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first; nothing is
                done unless every layer keeps both.
            dtype: Type of keys and values.
        """
        if self.is_settled or len(shapes) != 2 * len(self._layers):
            return
        for layer, keys, values in zip(self._layers, shapes[::2], shapes[1::2], strict=True):
            layer.keys, layer.values = (
                torch.zeros(0, heads, 0, size, dtype=dtype, device=self.device)
                for heads, size in (keys, values)
            )
            layer.is_initialized = True
        self.settle()

    def settle(self) -> None:
        """After the first forward: gather the layers' memory into shared blocks."""
        if self._slabs:
            return
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor in self._tensors():
            groups.setdefault(tuple(tensor.shape), []).append(tensor)
        self._slabs = [torch.stack(tensors) for tensors in groups.values()]
        self._point_layers()
        self._placement.settled = True

    def keep(self, row: int, start: int, columns: Sequence[int]) -> None:
        """Move these columns of a row together, from `start` on."""
        index = torch.tensor(columns).to(self.device, non_blocking=True)
        for slab in self._slabs:
            slab[:, row, :, start : start + len(columns)] = slab[:, row].index_select(2, index)

    def save(self, sequence: int, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return copies of keys and values of committed tokens, `[tensors, heads, tokens, head_dim]`."""
        index = self._index_of[sequence]
        return tuple(slab[:, index, :, start:stop].clone() for slab in self._slabs)

    def load(self, sequence: int, kept: Sequence[Sequence[Tensor]]) -> None:
        """Fill an empty row with copies of `save`, in order, and commit them."""
        index, row, start = self._index_of[sequence], self.row(sequence), 0
        self.place(slice(index, index + 1), (0,), sum(piece[0].shape[2] for piece in kept))
        with torch.inference_mode():
            for piece in kept:
                for slab, part in zip(self._slabs, piece, strict=True):
                    slab[:, index, :, start : start + part.shape[2]] = part
                start += piece[0].shape[2]
        row.length = start

    # The memory.

    @property
    def bytes_per_token(self) -> int:
        """Memory of the keys and values of a token."""
        shapes = ((slab.shape[0] * slab.shape[2] * slab.shape[4], slab) for slab in self._slabs)
        return sum(size * slab.element_size() for size, slab in shapes)

    @property
    def least_columns(self) -> int:
        """Columns of a cache of short texts."""
        return self._least + self._spare

    def reserve(self, rows: int) -> None:
        """Reserve this number of rows from now on; the memory does not move while texts are short."""
        if rows > self._num_rows:
            self._resize(rows, self._num_columns)
        self._least_rows = max(self._least_rows, rows)

    @property
    def capacity(self) -> int:
        """Columns of every row, written or not."""
        return self._num_columns

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(slab.numel() * slab.element_size() for slab in self._slabs)

    def give_back(self) -> None:
        """Free all memory; no row may be in use."""
        if self._num_rows:
            self._resize(0, 0)

    def _resize(self, rows: int, columns: int) -> None:
        """Resize the cache; release memory that no open sequence needs."""
        if columns > self._num_columns:
            columns = max(columns, int(self._num_columns * self._growth))
        elif 2 * columns > self._num_columns:
            columns = self._num_columns
        columns = -(-max(columns, self.least_columns if rows else 0) // _COLUMNS) * _COLUMNS
        if self._spare and rows:
            rows = power_of_two(max(rows, self._least_rows))
        if not (rows > self._num_rows or 2 * rows <= self._num_rows):
            rows = self._num_rows
        resized: list[Tensor] = []
        for slab in self._slabs:
            tensors, old_rows, heads, old_columns, width = slab.shape
            kept_rows, kept_columns = min(old_rows, rows), min(old_columns, columns)
            new = slab.new_zeros(tensors, rows, heads, columns, width)
            new[:, :kept_rows, :, :kept_columns] = slab[:, :kept_rows, :, :kept_columns]
            resized.append(new)
        # Only now: where memory runs out, the cache stays as it was.
        self._slabs, self._num_rows, self._num_columns = resized, rows, columns
        self._point_layers()

    def _point_layers(self) -> None:
        if not self._slabs:
            return
        self._views.clear()
        self.layout = object()
        # The order within a block is the order of the layers, keys before values: see `_tensors`.
        views = {tuple(slab.shape[2:3] + slab.shape[4:]): iter(slab) for slab in self._slabs}
        for layer in self._layers:
            if layer.is_initialized:
                assert layer.keys is not None and layer.values is not None
                layer.keys = next(views[layer.keys.shape[1], layer.keys.shape[3]])
                layer.values = next(views[layer.values.shape[1], layer.values.shape[3]])

    def _tensors(self) -> list[Tensor]:
        return [
            tensor
            for layer in self._layers
            for tensor in (layer.keys, layer.values)
            if layer.is_initialized and tensor is not None
        ]


def written_columns(starts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return the first `width` columns from each start on, `[rows, width]`."""
    if len(starts) == 1:  # as every step of a head asks
        return run_of(starts[0], width)[None].to(device, non_blocking=True)
    columns = torch.tensor(starts)[:, None] + torch.arange(width)
    return columns.to(device, non_blocking=True)


def power_of_two(count: int) -> int:
    """Return the power of two at or above a positive number."""
    return 1 << (count - 1).bit_length()
