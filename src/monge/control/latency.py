"""Seconds of a round, learned from finished rounds.

Reads no clock: the engine measures whole rounds and hands their times over.
"""

import math
from collections import deque
from collections.abc import Mapping
from copy import copy
from statistics import median
from typing import Final

_RECENT: Final = 8
"""Times of each kind of round that are kept. The shortest of them counts, because whatever else
runs on the machine makes a round longer and never shorter."""
_ENOUGH: Final = 3
"""Times of a kind of round from which the shortest is believed. Fewer are upper bounds only: the
first rounds of a kind may be slow, and would never be tried again."""
_NODE: Final = 0.04
"""Share of a plain round that a drafted node is taken to cost before rounds were measured."""
_DRAFT: Final = 0.1
"""The same share, of a level that a draft network draws."""


class Latency:
    """Seconds of a round by drafter, batch size and draft depth; depth 0 is plain decoding.

    Batch sizes are rounded up to powers of two. Depths that were not measured lie on the lines
    through the measured depths, and no depth takes longer than a larger depth. A batch size that
    was not measured has the proportions of the nearest measured size.

    Args:
        plain_s: Seconds of a plain round before any was measured.
        node_share: Seconds of a drafted node as a share of a plain round, before it was measured.
        draft_share: The same of a level drawn by a network, in addition to its node.
        learns: Whether measured rounds count.

    Attributes:
        times: Recent seconds by drafter, batch size (rounded up) and depth.
    """

    def __init__(
        self,
        *,
        plain_s: float = 1.0,
        node_share: float = _NODE,
        draft_share: float = _DRAFT,
        learns: bool = True,
    ) -> None:
        self.learns = learns
        self._plain_s, self._node_share = plain_s, node_share
        self._level_share = node_share + draft_share
        # Views share it, so that a measured round counts for all.
        self.times: dict[tuple[str | None, int, int], deque[float]] = {}
        self._drafter: str | None = None

    @classmethod
    def linear(cls, *, plain: float, node: float, draft: float) -> "Latency":
        """Return fixed times: `plain + depth * (node + draft)`; model-free drafters cost no `draft`."""
        return cls(plain_s=plain, node_share=node / plain, draft_share=draft / plain, learns=False)

    def of(self, drafter: str | None, *, runs_network: bool) -> "Latency":
        """Return a view for the rounds of a drafter of a pool."""
        view = copy(self)
        view._drafter = drafter
        if not runs_network:
            view._level_share = self._node_share
        return view

    def round_s(self, depth: int, batch_size: int = 1) -> float:
        """Return the seconds of a round whose deepest draft has `depth` levels."""
        return self.rounds_s(depth, batch_size)[depth]

    def rounds_s(self, deepest: int, batch_size: int = 1) -> list[float]:
        """Return `round_s` of the depths 0 to `deepest`."""
        row = self._row(batch_size)
        return [self._at(row, depth) for depth in range(deepest + 1)]

    def usual_s(self, depth: int, batch_size: int = 1) -> float:
        """Return the median of the measured rounds, which single rounds are fairly compared with."""
        key = self._drafter if depth else None, _bucket(batch_size), depth
        times = self.times.get(key) if self.learns else None
        return median(times) if times else self.round_s(depth, batch_size)

    def observe(
        self, seconds: float, *, depth: int, batch_size: int = 1, drafter: str | None = None
    ) -> None:
        """Learn from a measured round of a batch.

        Args:
            seconds: Seconds of the whole round; ignored unless positive and finite.
            depth: Depth of the deepest tree.
            batch_size: Requests that shared the round.
            drafter: Name of the drafter of a pool that drafted; `None` without a pool.
        """
        if self.learns and math.isfinite(seconds) and seconds > 0.0:
            key = drafter if depth else None, _bucket(batch_size), depth
            self.times.setdefault(key, deque(maxlen=_RECENT)).append(seconds)

    def _row(self, batch_size: int) -> dict[int, float]:
        """Return the seconds of a batch size by depth, for the measured depths; always for depth 0."""
        bucket, rows = _bucket(batch_size), dict[int, dict[int, float]]()
        seldom: dict[int, float] = {}
        for (drafter, batch, depth), times in self.times.items():
            if depth > 0 and drafter != self._drafter:
                continue
            if depth == 0 or len(times) >= _ENOUGH or not self.learns:
                rows.setdefault(batch, {})[depth] = min(times)
            elif batch == bucket:
                seldom[depth] = min(times)
        measured = rows.pop(bucket, {})
        near = [batch for batch, row in rows.items() if 0 in row]
        nearest = min(near, key=lambda batch: abs(math.log(batch / bucket)), default=None)
        usual = {0: self._plain_s} if nearest is None else rows[nearest]
        # In proportion to the shallowest round of this batch size that was measured.
        first = min(measured, default=0)
        scale = measured[first] / self._at(usual, first) if measured else 1.0
        row = {depth: scale * seconds for depth, seconds in usual.items()} | measured
        bounds = {depth: min(spent, self._at(row, depth)) for depth, spent in seldom.items()}
        return row | bounds

    def _at(self, row: Mapping[int, float], depth: int) -> float:
        """Return the seconds of a depth, on the lines through the measured depths."""
        deeper = [measured for measured in row if measured >= depth]
        above = max(measured for measured in row if measured <= depth)
        if deeper:
            below = min(deeper)
            share = (depth - above) / (below - above) if below > above else 0.0
            line = row[above] + share * (row[below] - row[above])
            return min(line, *(row[measured] for measured in deeper))
        level = (row[above] - row[0]) / above if above else self._level_share * row[0]
        return row[above] + max(0.0, level) * (depth - above)


def _bucket(batch_size: int) -> int:
    """Return the power of two at or above a batch size."""
    return 1 << (batch_size - 1).bit_length()
