"""Which row of a cache holds which sequence, and how far it is filled."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from monge.engine.models.masks import UncommittedNodes
from monge.engine.models.tree_cache import TreeCache


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

        Those between them would be read as padding, a forward's width each. To move a row once is cheaper than that, and rows
        that were read together stay together.
        """
        indices = [self._index_of[sequence] for sequence in sequences]
        count, first = len(indices), min(indices)
        if max(indices) - first + 1 > count:
            wanted = set(indices)
            starts = range(len(self._rows) - count + 1)
            first = max(starts, key=lambda start: sum(index in wanted for index in range(start, start + count)))
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
            assert where == index, f"row {index} holds sequence {row.sequence}, which is listed in row {where}"
            assert row.length >= 0

    def _swap(self, one: int, other: int) -> None:
        rows, index_of = self._rows, self._index_of
        if rows[one].end or rows[other].end:
            self._cache.swap_rows(one, other)
        rows[one], rows[other] = rows[other], rows[one]
        index_of[rows[one].sequence], index_of[rows[other].sequence] = one, other
