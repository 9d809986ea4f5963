"""Seconds of a round, learned from finished rounds.

Reads no clock: the engine measures whole rounds and hands their times over.
"""

import math
from collections import deque
from collections.abc import Mapping
from copy import copy
from typing import Any, Final

from monge.core.verdict import RoundTiming

_RECENT: Final = 8
"""Times of each kind of round that are kept. The shortest of them counts, because whatever else
runs on the machine makes a round longer and never shorter."""
_NODE: Final = 0.04
"""Share of a plain round that a drafted node is taken to cost before rounds were measured."""
_DRAFT: Final = 0.1
"""The same share, of a level that a draft network draws."""


class Latency:
    """Seconds of a round by drafter, batch size and draft depth; depth 0 is plain decoding.

    Batch sizes are rounded up to powers of two. A depth between two measured ones is interpolated,
    and no depth takes longer than a deeper one. A batch size that was not measured borrows the
    proportions of the nearest one.

    Args:
        plain_s: Seconds of a plain round before any was measured.
        node_share: Seconds of a drafted node as a share of a plain round, before any was measured.
        draft_share: The same of a level drawn by a network, in addition to its node.
        learns: Whether measured rounds count.
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
        self._plain_s, self._node, self._draft = plain_s, node_share, draft_share
        # By drafter, batch size and depth. Views share it, so that a measured round counts for all.
        self._times: dict[tuple[str | None, int, int], deque[float]] = {}
        self._drafter: str | None = None
        self._runs_network = True

    @classmethod
    def linear(cls, *, plain: float, node: float, draft: float) -> "Latency":
        """Return fixed times: `plain + depth * (node + draft)`; model-free drafters cost no `draft`."""
        return cls(plain_s=plain, node_share=node / plain, draft_share=draft / plain, learns=False)

    @classmethod
    def table(cls, rounds: Mapping[int, Mapping[int, float]]) -> "Latency":
        """Return fixed times of rounds without a pool, by batch size and depth."""
        made = cls()
        for batch_size, row in rounds.items():
            for depth, seconds in row.items():
                made.observe(RoundTiming(depth=depth, batch_size=batch_size, seconds=seconds))
        made.learns = False
        return made

    def of(self, drafter: str | None, *, runs_network: bool) -> "Latency":
        """Return a view for the rounds of one drafter of a pool."""
        view = copy(self)
        view._drafter, view._runs_network = drafter, runs_network
        return view

    def round_s(self, depth: int, batch_size: int = 1) -> float:
        """Return the seconds of a round whose deepest draft has `depth` levels."""
        return _at(self._row(batch_size), depth, self._level_share)

    def rounds_s(self, deepest: int, batch_size: int = 1) -> list[float]:
        """Return `round_s` of the depths 0 to `deepest`."""
        row = self._row(batch_size)
        return [_at(row, depth, self._level_share) for depth in range(deepest + 1)]

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a measured round. A time that is no positive finite number is ignored."""
        if not (self.learns and math.isfinite(timing.seconds) and timing.seconds > 0.0):
            return
        drafter = timing.drafter if timing.depth else None
        key = drafter, _bucket(timing.batch_size), timing.depth
        self._times.setdefault(key, deque(maxlen=_RECENT)).append(timing.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the shortest recent times as plain values."""
        return {
            f"{drafter or ''}|{batch}|{depth}": min(times)
            for (drafter, batch, depth), times in self._times.items()
        }

    @property
    def _level_share(self) -> float:
        return self._node + (self._draft if self._runs_network else 0.0)

    def _row(self, batch_size: int) -> dict[int, float]:
        """Return the seconds of a batch size by depth, as far as they are known; always of depth 0."""
        bucket, rows = _bucket(batch_size), dict[int, dict[int, float]]()
        for (drafter, batch, depth), times in self._times.items():
            if drafter == self._drafter or depth == 0:
                rows.setdefault(batch, {})[depth] = min(times)
        own = rows.pop(bucket, {})
        near = min(
            (batch for batch, row in rows.items() if 0 in row),
            key=lambda batch: abs(math.log(batch / bucket)),
            default=None,
        )
        usual = {0: self._plain_s} if near is None else rows[near]
        if 0 not in own:
            # A plain round in proportion to the shallowest round that was measured.
            depth = min(own, default=0)
            share = usual[0] / _at(usual, depth, self._level_share)
            own = {0: own[depth] * share if own else usual[0]} | own
        return {depth: seconds * own[0] / usual[0] for depth, seconds in usual.items()} | own


def _bucket(batch_size: int) -> int:
    """Return the power of two at or above a batch size."""
    return 1 << (batch_size - 1).bit_length()


def _at(row: Mapping[int, float], depth: int, level_share: float) -> float:
    """Return the seconds of a depth, on the lines through the known ones."""
    deeper = [known for known in row if known >= depth]
    last = max(known for known in row if known <= depth)
    if not deeper:
        slope = (row[last] - row[0]) / last if last else level_share * row[0]
        return row[last] + max(0.0, slope) * (depth - last)
    following = min(deeper)
    gap = following - last
    seconds = (
        row[last] if not gap else (row[last] + (row[following] - row[last]) * (depth - last) / gap)
    )
    return min(seconds, *(row[known] for known in deeper))
