"""A key-value cache that reads trees.

One row per sequence, filled from the left, rolled back by forgetting.

Row r holds its committed tokens in columns 0 .. length-1, so a column is a position, and its
uncommitted nodes behind them in reading order. Committing a path moves its columns together;
dropping nodes moves nothing. Rows of different length live in one batch: each forward writes every
row at its own end, and the mask hides what lies behind it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from monge.core.errors import UnsupportedModelError
from monge.engine.models.masks import UncommittedNodes

_COLUMNS: Final = 64  # columns are added in steps, so that a growing text rarely moves the cache


class _Placement:
    """Where the coming forward writes: shared by all layers, set once per forward."""

    def __init__(self) -> None:
        self.rows = slice(0, 0)
        self.starts: tuple[int, ...] = ()
        self.end = 0
        self.capacity = (0, 0)
        self.settled = False
        self.row_index: Tensor | None = None
        self.column_index: Tensor | None = None

    def set(
        self,
        rows: slice,
        starts: Sequence[int],
        width: int,
        capacity: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.rows, self.starts, self.capacity = rows, tuple(starts), capacity
        self.end = max(starts) + width
        if len(set(starts)) == 1:
            self.row_index = self.column_index = None
        else:
            self.row_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
            self.column_index = torch.tensor(starts).to(device, non_blocking=True)[
                :, None
            ] + torch.arange(width, device=device)


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, `[rows, heads, columns, head_dim]`."""

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
        # Zeros, not empty memory: hidden columns get weight zero, and zero times NaN would still be
        # NaN.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(
            rows, value_states.shape[1], columns, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self._placement
        assert self.keys is not None and self.values is not None
        if place.column_index is None:
            self.keys[place.rows, :, place.starts[0] : place.end] = key_states
            self.values[place.rows, :, place.starts[0] : place.end] = value_states
        else:
            self.keys[place.row_index, :, place.column_index] = key_states.transpose(1, 2)
            self.values[place.row_index, :, place.column_index] = value_states.transpose(1, 2)
        return self.keys[place.rows, :, : place.end], self.values[place.rows, :, : place.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._placement.end, 0

    def get_seq_length(self) -> int:
        # A layer that reads images keeps nothing of a text, and says so by its length.
        return max(self._placement.starts, default=0) if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The cache object handed to the network, with the operations of the loop.

    Args:
        num_layers: Layers of the network that keep keys and values.
        device: Where the index tensors of ragged writes live.
        growth: How much more room there is after it ran out. Steps that were recorded for an
            address are recorded anew then.
    """

    def __init__(self, num_layers: int, device: torch.device, growth: float = 1.25) -> None:
        self._placement = _Placement()
        self._layers = [_Layer(self._placement) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))
        self._device, self._growth = device, growth
        self._num_rows = 0
        self._num_columns = 0
        # Layers of one shape share one block of memory, `[tensors, rows, heads, columns,
        # head_dim]`: moving a path is then one operation for the whole network instead of two per
        # layer.
        self._slabs: list[Tensor] = []
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._layout = object()

    @property
    def is_settled(self) -> bool:
        """Whether a first forward has shown which layers keep what."""
        return self._placement.settled

    @property
    def starts(self) -> tuple[int, ...]:
        """First column that the coming forward writes, row by row."""
        return self._placement.starts

    @property
    def rows(self) -> slice:
        """Rows of the coming forward."""
        return self._placement.rows

    @property
    def layout(self) -> object:
        """Another object whenever keys and values have moved to other memory."""
        return self._layout

    def columns(self, width: int) -> Tensor:
        """Columns that the coming forward writes, `[rows, width]`."""
        starts = torch.tensor(self._placement.starts).to(self._device, non_blocking=True)
        return starts[:, None] + torch.arange(width, device=self._device)

    def kept(self) -> list[Tensor]:
        """Keys and values of the rows of the coming forward, layer by layer, keys first.

        Written to by who is given them.
        """
        rows = self._placement.rows
        views = self._views.get((rows.start, rows.stop))
        if views is None:
            views = [tensor[rows] for tensor in self._tensors()]
            self._views[rows.start, rows.stop] = views
        return views

    def place(
        self, rows: slice, starts: Sequence[int], width: int, held: tuple[int, int] = (0, 0)
    ) -> None:
        """Say where the coming forward writes.

        Row `rows.start + i` from column `starts[i]`, `width` columns each.

        Args:
            rows: Rows of the forward.
            starts: First column of each.
            width: Columns.
            held: Rows in use, those outside the forward included, and columns of the longest of
                them.
        """
        if not self._placement.settled:
            # A first forward that failed half-way has laid out nothing that can be used.
            for layer in self._layers:
                layer.is_initialized = False
        num_rows, num_columns = max(rows.stop, held[0]), max(max(starts) + width, held[1])
        # Some backends read every column there is: after a long text, a short one gets a short
        # cache.
        is_long = 2 * num_columns + _COLUMNS < self._num_columns
        if num_rows > self._num_rows or num_columns > self._num_columns or is_long:
            self._resize(num_rows, num_columns)
        self._placement.set(rows, starts, width, (self._num_rows, self._num_columns), self._device)

    def lay_out(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """Do without a first forward: what each layer keeps is known.

        Args:
            shapes: `(heads, head_dim)` of keys and values, layer by layer, keys first; nothing is
                done unless every layer keeps both.
            dtype: Type of keys and values.
        """
        if len(shapes) != 2 * len(self._layers):
            return
        for layer, keys, values in zip(self._layers, shapes[::2], shapes[1::2], strict=True):
            layer.keys, layer.values = (
                torch.zeros(0, heads, 0, size, dtype=dtype, device=self._device)
                for heads, size in (keys, values)
            )
            layer.is_initialized = True
        self.settle()

    def settle(self) -> None:
        """After the first forward: gather the layers' memory into shared blocks."""
        if not self._slabs:
            self._stack()
            self._placement.settled = True

    def keep(self, row: int, start: int, columns: Sequence[int]) -> None:
        """Move these columns of a row together, from `start` on."""
        index = torch.tensor(columns).to(self._device, non_blocking=True)
        for slab in self._slabs:
            slab[:, row, :, start : start + len(columns)] = slab[:, row].index_select(2, index)

    def move_row(self, source: int, destination: int, num_columns: int) -> None:
        """Copy the first columns of a row over another row, whose own content is forgotten."""
        if destination >= self._num_rows:
            return  # neither was ever written to
        for slab in self._slabs:
            slab[:, destination] = 0
            if source < self._num_rows:
                slab[:, destination, :, :num_columns] = slab[:, source, :, :num_columns]

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows, whole: what either sequence left behind its end stays its own."""
        if max(one, other) >= self._num_rows:
            self._resize(max(one, other) + 1, self._num_columns)
        # All copies first: where memory runs out, no layer has been exchanged without the others.
        copies = [slab[:, [other, one]] for slab in self._slabs]
        for slab, copy in zip(self._slabs, copies, strict=True):
            slab[:, one], slab[:, other] = copy[:, 0], copy[:, 1]

    def clear_row(self, row: int) -> None:
        """Zero a row, so that whatever it held can never meet a later sequence."""
        if row < self._num_rows:
            for slab in self._slabs:
                slab[:, row] = 0

    def give_back(self) -> None:
        """Free all memory; no row may be in use."""
        if self._num_rows:
            self._resize(0, 0)

    @property
    def capacity(self) -> int:
        """Columns of every row, written or not."""
        return self._num_columns

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(slab.numel() * slab.element_size() for slab in self._slabs)

    def _resize(self, rows: int, columns: int) -> None:
        """Make room; what is much more than anybody needs is given back, so that one long text is not paid for ever after."""
        if columns > self._num_columns:
            columns = max(columns, int(self._num_columns * self._growth))
        elif 2 * columns > self._num_columns:
            columns = self._num_columns
        columns = -(-columns // _COLUMNS) * _COLUMNS
        if not (rows > self._num_rows or 2 * rows <= self._num_rows):
            rows = self._num_rows
        resized: list[Tensor] = []
        for slab in self._slabs:
            tensors, old_rows, heads, old_columns, width = slab.shape
            kept_rows, kept_columns = min(old_rows, rows), min(old_columns, columns)
            new = slab.new_zeros(tensors, rows, heads, columns, width)
            new[:, :kept_rows, :, :kept_columns] = slab[:, :kept_rows, :, :kept_columns]
            resized.append(new)
        # Not before all of it is there: where memory runs out, the cache is as large as it was, and
        # says so.
        self._slabs, self._num_rows, self._num_columns = resized, rows, columns
        self._point_layers()

    def _stack(self) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor in self._tensors():
            groups.setdefault(tuple(tensor.shape), []).append(tensor)
        self._slabs = [torch.stack(tensors) for tensors in groups.values()]
        self._point_layers()

    def _point_layers(self) -> None:
        if not self._slabs:
            return
        self._views.clear()
        self._layout = object()
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


@dataclass(slots=True)
class CacheRow:
    """One sequence: how many columns are committed, and what is read behind them."""

    sequence: int
    length: int = 0
    nodes: UncommittedNodes = field(default_factory=UncommittedNodes)

    @property
    def end(self) -> int:
        """Columns that are filled."""
        return self.length + len(self.nodes)


class RowTable:
    """The rows in use, without gaps; a forward reads rows that lie side by side.

    Args:
        cache: What holds their keys and values; a row that moves here moves there.
    """

    def __init__(self, cache: TreeCache) -> None:
        self._cache = cache
        self._rows: list[CacheRow] = []
        self._index_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, sequence: int) -> CacheRow:
        return self._rows[self._index_of[sequence]]

    @property
    def held(self) -> tuple[int, int]:
        """Rows in use, and columns of the longest."""
        return len(self._rows), max((row.end for row in self._rows), default=0)

    def index(self, sequence: int) -> int:
        """Where a sequence lies; it may move with every forward, and when one is closed."""
        return self._index_of[sequence]

    def open(self, sequence: int) -> None:
        """Give a sequence an empty row."""
        assert sequence not in self._index_of, f"sequence {sequence} is open already"
        self._index_of[sequence] = len(self._rows)
        self._rows.append(CacheRow(sequence))

    def rename(self, sequence: int, new: int, length: int) -> None:
        """Give a sequence's row to another one, which keeps the first columns."""
        assert new not in self._index_of, f"sequence {new} is open already"
        index = self._index_of.pop(sequence)
        self._index_of[new], self._rows[index] = index, CacheRow(new, length)

    def close(self, sequence: int) -> None:
        """Take a row back; the last one fills the gap."""
        index, last = self._index_of.pop(sequence), self._rows.pop()
        if last.sequence != sequence:
            self._cache.move_row(len(self._rows), index, last.end)
            self._rows[index] = last
            self._index_of[last.sequence] = index
        self._cache.clear_row(len(self._rows))

    def together(self, sequences: Iterable[int]) -> slice:
        """Rows of these sequences, side by side.

        Those between them would be read as padding, a forward's width each. To move a row once is
        cheaper than that, and rows that were read together stay together.
        """
        indices = [self._index_of[sequence] for sequence in sequences]
        count, first = len(indices), min(indices)
        if max(indices) - first + 1 > count:
            wanted = set(indices)
            starts = range(len(self._rows) - count + 1)
            first = max(
                starts,
                key=lambda start: sum(index in wanted for index in range(start, start + count)),
            )
            inside = range(first, first + count)
            others = (index for index in inside if index not in wanted)
            for index in indices:
                if index not in inside:
                    self._swap(index, next(others))
        return slice(first, first + count)

    def rows(self, where: slice) -> list[CacheRow]:
        """What lies there."""
        return self._rows[where]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the bookkeeping contradicts itself."""
        assert len(self._rows) == len(self._index_of), "rows and sequences differ in number"
        for index, row in enumerate(self._rows):
            where = self._index_of[row.sequence]
            assert where == index, (
                f"row {index} holds sequence {row.sequence}, which is listed in row {where}"
            )
            assert row.length >= 0

    def _swap(self, one: int, other: int) -> None:
        rows, index_of = self._rows, self._index_of
        if rows[one].end or rows[other].end:
            self._cache.swap_rows(one, other)
        rows[one], rows[other] = rows[other], rows[one]
        index_of[rows[one].sequence], index_of[rows[other].sequence] = one, other
