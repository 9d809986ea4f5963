"""What a finished round teaches the table of costs."""

from collections.abc import Sequence
from functools import cache
from typing import Final

from monge.core.verdict import RoundKind, RoundTiming
from monge.engine.parts import Parts
from monge.engine.row import Row

_NOBODY: Final = frozenset[str | None]()


def learn_costs(rows: Sequence[Row], parts: Parts) -> None:
    """Correct the decoder's costs by what this round took."""
    costs = parts.memory.costs
    if costs is None or not rows:
        return
    last = rows[0].session.records[-1]
    if not costs.is_due(_kind(rows, parts), last.times.total_s):
        return
    records = [row.session.records[-1] for row in rows]
    networks = {record.drafter for record in records if record.depth and parts.runs_network(record.drafter)}
    timing = RoundTiming(
        num_nodes=max(record.num_nodes for record in records),
        # Where two networks drafted for one batch, their times cannot be told apart.
        depth=max(record.depth for record in records if record.drafter in networks) if len(networks) == 1 else 0,
        batch_size=last.batch_size,
        context_length=max(record.context_length for record in records),
        draft_s=last.times.draft_s,
        rest_s=last.times.total_s - last.times.draft_s,
        drafter=next(iter(networks), None),
    )
    (costs.observe_whole if last.as_one else costs.observe)(timing)


def _kind(rows: Sequence[Row], parts: Parts) -> RoundKind:
    """What kind the finished round was; asked after every one."""
    if len(rows) == 1:
        session = rows[0].session
        last, num_before = session.records[-1], session.num_rounds - 1
        if not last.depth:
            return RoundKind(_NOBODY, last.as_one, False, num_before)
        return RoundKind(_only(last.drafter), last.as_one, parts.runs_network(last.drafter), num_before)
    ended = [row.session.records[-1] for row in rows]
    drafters = frozenset([record.drafter for record in ended if record.depth])
    runs_network = any(map(parts.runs_network, drafters))
    return RoundKind(drafters, ended[0].as_one, runs_network, max(row.session.num_rounds for row in rows) - 1)


@cache
def _only(drafter: str | None) -> frozenset[str | None]:
    return frozenset({drafter})
