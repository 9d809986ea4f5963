"""Seconds of a round as a function of batch size, drafted nodes, draft depth and context length.

Reads no clock.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

from monge.core.errors import OptionError
from monge.core.verdict import RoundTiming

Table = Mapping[int, Mapping[int, float]]
"""Seconds by batch size, then by number of nodes or draft levels."""

_OWN_RATE: Final = 0.12  # share of log(measured / predicted) that the observed entry takes over
# Other entries of the batch size: most of a surprise is the moment's, not the size's.
_SAME_BATCH_RATE: Final = 0.11
_DRIFT_RATE: Final = 0.04  # all other entries
# Largest log-ratio that one round may show; a busy machine says nothing about costs.
_LARGEST_RATIO: Final = 0.4
_CATCH_UP_RATE: Final = 0.3
_RESOLUTION_S: Final = 1e-9


class Latency:
    """Seconds of a round.

    `draft_s(depth, batch) + verify_s(nodes, batch, context)`; overhead counts as verification.

    `verify_s` interpolates a table linearly and never falls with the number of nodes. Where the
    target runs graphs of fixed sizes, numbers of nodes are rounded up to them. Measured rounds
    correct the table.

    Args:
        verify_s: Seconds without drafting, by batch size and drafted nodes (0: plain decoding), at
            `base_context`.
        draft_s: Seconds of drafting by batch size and depth.
        context_s: Seconds per further token of context and per request.
        base_context: Context length at which the table holds, in tokens.
        graph_sizes: Numbers of tokens, the root counted, that the target's graphs are padded to.
        nodes: Drafted nodes by depth of the plan, from depth 0 on; a chain continues after the last
            entry.
        learns: Whether measured rounds correct the table.
        drafters: `draft_s` and `nodes` of each network of a pool, by name; other names use those
            above.
        deepest: Depth of the deepest draft; `None` for unbounded.

    Raises:
        OptionError: If a table is empty or holds a time that is not a positive finite number
            (drafting may cost 0).
    """

    def __init__(
        self,
        *,
        verify_s: Table,
        draft_s: Table,
        context_s: float | int = 0.0,
        base_context: int = 0,
        graph_sizes: Sequence[int] = (),
        nodes: Sequence[int] = (),
        learns: bool = True,
        drafters: Mapping[str, tuple[Table, Sequence[int]]] = MappingProxyType({}),
        deepest: int | None = None,
    ) -> None:
        if not (math.isfinite(context_s) and context_s >= 0.0):
            raise OptionError(f"latency: context_s must be a number >= 0; got {context_s}")
        self.graph_sizes = tuple(sorted(graph_sizes))
        self._verify = {
            batch: _isotonic({self._padded(size): seconds for size, seconds in row.items()})
            for batch, row in _checked("verify_s", verify_s, may_be_zero=False).items()
        }
        self._draft = _checked("draft_s", draft_s, may_be_zero=True)
        self.context_s, self.base_context, self.learns, self.deepest = (
            float(context_s),
            base_context,
            learns,
            deepest,
        )
        self._nodes = {None: tuple(nodes)} | {
            name: tuple(its_nodes) for name, (_, its_nodes) in drafters.items()
        }
        self._drafts = {
            # One table where both are the same, so that a correction holds for both.
            name: self._draft
            if table == draft_s
            else _checked(f"draft_s of {name}", table, may_be_zero=True)
            for name, (table, _) in drafters.items()
        }
        self._name: str | None = None  # whose nodes `nodes` are
        # Network and batch size of the last round, if it drafted.
        self._last_drafter: tuple[str | None, int] | None = None
        self._catch_up_s = [0.0]  # in a list, so that the views share it

    @classmethod
    def linear(cls, *, plain: float, node: float, draft: float, learns: bool = False) -> "Latency":
        """`plain` seconds for a plain round, `node` more per drafted node, `draft` per drafted level, for one request."""
        return cls(
            verify_s={1: {0: plain, 64: plain + 64 * node}},
            draft_s={1: {0: 0.0, 64: 64 * draft}},
            learns=learns,
        )

    @property
    def catch_up_s(self) -> float:
        """Seconds that a network needs, beyond its usual draft, to read the text that it missed.

        0 until measured.
        """
        return self._catch_up_s[0]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Drafted nodes by depth of the plan, as far as they are known."""
        return self._nodes.get(self._name, self._nodes[None])

    def num_nodes(self, depth: int) -> int:
        """Drafted nodes of a plan of some depth."""
        known = self.nodes
        if depth < len(known):
            return known[depth]
        return (known[-1] - len(known) + 1 if known else 0) + depth

    def within(self, depth: int) -> int:
        """The depth, or that of the deepest draft if it is smaller."""
        return depth if self.deepest is None else min(depth, max(1, self.deepest))

    def verify_s(
        self, num_nodes: int, batch_size: int = 1, context_length: int | None = None
    ) -> float:
        """Seconds of a round without its drafting."""
        base = _interpolated(self._verify, batch_size, self._padded(num_nodes))
        if context_length is None:
            return base
        return max(
            base + self.context_s * batch_size * (context_length - self.base_context), 0.1 * base
        )

    def draft_s(self, depth: int, batch_size: int = 1) -> float:
        """Seconds of drafting."""
        return _interpolated(self._draft, batch_size, depth) if depth else 0.0

    def round_s(self, depth: int, batch_size: int = 1, context_length: int | None = None) -> float:
        """Seconds of a round whose plan has some depth; 0 is plain decoding."""
        return self.verify_s(self.num_nodes(depth), batch_size, context_length) + self.draft_s(
            depth, batch_size
        )

    def rounds_s(
        self, deepest: int, batch_size: int = 1, context_length: int | None = None
    ) -> list[float]:
        """`round_s` of the depths 0 to `deepest`."""
        return [self.round_s(depth, batch_size, context_length) for depth in range(deepest + 1)]

    def without_drafting(self) -> "Latency":
        """A view of this table, corrections included, for model-free chains."""
        free = copy(self)
        free._draft, free._name, free._nodes = {1: {0: 0.0}}, None, {None: ()}
        return free

    def of(self, drafter: str) -> "Latency":
        """A view of this table, corrections included, with the drafting of one network of a pool."""
        own = copy(self)
        own._draft, own._name = self._drafts.get(drafter, self._draft), drafter
        return own

    def observe(self, timing: RoundTiming) -> None:
        """Correct the table by one measured round; times that are not positive numbers are ignored."""
        drafter = (timing.drafter, timing.batch_size) if timing.depth else None
        is_first_draft = timing.catches_up and drafter is not None and drafter != self._last_drafter
        self._last_drafter = drafter
        if not self.learns:
            return
        at = timing.batch_size, timing.context_length
        predicted = self.verify_s(timing.num_nodes, *at)
        # The network first reads the text that it missed, which is no cost of the drafts after it.
        if _is_time(timing.rest_s) and (not is_first_draft or timing.rest_s < predicted):
            _correct(
                self._verify,
                timing.batch_size,
                self._padded(timing.num_nodes),
                timing.rest_s,
                predicted,
            )
            self._verify[timing.batch_size] = _isotonic(self._verify[timing.batch_size])
        if not timing.depth:
            return
        table, name = self._drafts.get(timing.drafter or "", self._draft), timing.drafter
        self._note_nodes(name if name in self._nodes else None, timing.depth, timing.num_nodes)
        if not _is_time(timing.draft_s):
            return
        expected = _interpolated(table, timing.batch_size, timing.depth)
        if not is_first_draft:
            _correct(table, timing.batch_size, timing.depth, timing.draft_s, expected)
        else:
            beyond = max(0.0, timing.draft_s - expected)
            self._catch_up_s[0] += (_CATCH_UP_RATE if self.catch_up_s else 1.0) * (
                beyond - self.catch_up_s
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "verify_s": _written(self._verify),
            "draft_s": _written(self._draft),
            "context_s": self.context_s,
            "base_context": self.base_context,
            "graph_sizes": list(self.graph_sizes),
            "nodes": list(self._nodes[None]),
            "deepest": self.deepest,
            "drafters": {
                name: {"draft_s": _written(table), "nodes": list(self._nodes[name])}
                for name, table in self._drafts.items()
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Latency":
        """The inverse of `as_dict`."""
        drafters = {
            name: (_read(own["draft_s"]), tuple(own["nodes"]))
            for name, own in values["drafters"].items()
        }
        rest = {
            name: values[name]
            for name in ("context_s", "base_context", "graph_sizes", "nodes", "deepest")
        }
        return cls(
            verify_s=_read(values["verify_s"]),
            draft_s=_read(values["draft_s"]),
            drafters=drafters,
            **rest,
        )

    def _note_nodes(self, name: str | None, depth: int, num_nodes: int) -> None:
        """Let the nodes of a depth follow those of a finished round."""
        known = self._nodes[name] or (0,)
        # A chain so far.
        known += tuple(range(known[-1] + 1, known[-1] + 1 + depth + 1 - len(known)))
        if num_nodes != known[depth]:
            moved = known[depth] + (1 if num_nodes > known[depth] else -1)
            self._nodes[name] = tuple(accumulate((*known[:depth], moved, *known[depth + 1 :]), max))

    def _padded(self, num_nodes: int) -> int:
        place = bisect_left(self.graph_sizes, num_nodes + 1)
        return self.graph_sizes[place] - 1 if place < len(self.graph_sizes) else num_nodes


def shortest_s(times: Iterable[float]) -> float:
    """Return the shortest of measured times, in seconds: an entry for a table.

    A clock that stands, goes back or shows no number counts as the smallest step of a clock.
    """
    return max(_RESOLUTION_S, min(filter(_is_time, times), default=0.0))


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0.0


def _checked(name: str, table: Table, *, may_be_zero: bool) -> dict[int, dict[int, float]]:
    """A sorted copy whose entries can be changed."""
    if not table or not all(table.values()):
        raise OptionError(
            f"latency: {name} is empty; measure at least one batch size and one number of nodes"
        )
    for batch, row in table.items():
        for size, seconds in row.items():
            good = _is_time(seconds) or (may_be_zero and seconds == 0.0)
            if not good or batch < 1 or size < 0:
                raise OptionError(
                    f"latency: {name}[{batch}][{size}] must be a "
                    f"{'' if may_be_zero else 'positive '}number of seconds; "
                    f"got {seconds}"
                )
    return {batch: dict(sorted(row.items())) for batch, row in sorted(table.items())}


def _interpolated(table: Table, batch: int, size: int) -> float:
    """An entry of the table, or the value on the line through its neighbours."""
    row = table.get(batch)
    if row is not None:
        return _on_line(row, size)
    if len(table) == 1 or batch < min(table):
        return _on_line(table[min(table)], size)
    return _on_line({own: _on_line(one, size) for own, one in table.items()}, batch)


def _on_line(row: Mapping[int, float], at: int) -> float:
    """Linear between the entries and beyond the last, where it never falls; constant before the first."""
    if at in row:
        return row[at]
    sizes = sorted(row)
    place = bisect_left(sizes, at)
    if len(sizes) == 1 or place == 0:
        return row[sizes[0]]
    is_beyond = place == len(sizes)
    low, high = sizes[-2:] if is_beyond else sizes[place - 1 : place + 1]
    line = row[low] + (row[high] - row[low]) * (at - low) / (high - low)
    return max(line, row[high]) if is_beyond else line


def _correct(
    table: dict[int, dict[int, float]], batch: int, size: int, measured: float, predicted: float
) -> None:
    """Move the table towards a measured time.

    The observed entry most, entries of the same batch size nearly as much.
    """
    if predicted == 0.0:
        return
    ratio = max(-_LARGEST_RATIO, min(_LARGEST_RATIO, math.log(measured / predicted)))
    if batch not in table:
        table[batch] = {
            other: _interpolated(table, batch, other) for other in next(iter(table.values()))
        }
    if size not in table[batch]:
        table[batch][size] = _on_line(table[batch], size)
        table[batch] = dict(sorted(table[batch].items()))
    own, same_batch, drift = (
        math.exp(rate * ratio) for rate in (_OWN_RATE, _SAME_BATCH_RATE, _DRIFT_RATE)
    )
    for other, row in table.items():
        for entry in row:
            # A plain round moves its whole batch size: what it took beyond the expected is the
            # machine's doing.
            is_same = other == batch
            row[entry] *= (
                own
                if is_same and size in (0, entry)
                else same_batch
                if is_same and entry > 0
                else drift
            )


def _isotonic(row: dict[int, float]) -> dict[int, float]:
    """The nearest row in least squares that never falls: adjacent violators are pooled."""
    blocks: list[tuple[float, int]] = []
    for _, seconds in sorted(row.items()):
        blocks.append((seconds, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (right, n), (left, m) = blocks.pop(), blocks.pop()
            blocks.append(((left * m + right * n) / (m + n), m + n))
    return dict(
        zip(sorted(row), (seconds for seconds, count in blocks for _ in range(count)), strict=True)
    )


def _written(table: Table) -> dict[str, dict[str, float]]:
    return {
        str(batch): {str(size): seconds for size, seconds in row.items()}
        for batch, row in table.items()
    }


def _read(rows: Mapping[str, Mapping[str, float]]) -> Table:
    return {
        int(batch): {int(size): float(seconds) for size, seconds in row.items()}
        for batch, row in rows.items()
    }
