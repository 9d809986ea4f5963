"""What a finished round teaches the table of costs."""

from collections.abc import Sequence
from functools import cache
from typing import Final

from monge.core.verdict import RoundKind, RoundTiming, StepRecord
from monge.engine.parts import Parts

_NOBODY: Final = frozenset[str | None]()


def learn_all_costs(untold: Sequence[Sequence[StepRecord]], num_before: int, parts: Parts) -> None:
    """Correct the decoder's costs by what rounds took.

    Args:
        untold: By request that shared them, their records.
        num_before: Rounds that the oldest of the requests had before the first of them.
        parts: The parts.
    """
    costs, (first, *others) = parts.memory.costs, untold
    if costs is None:
        return
    last, begin = len(first) - 1, 0
    is_rest = last > 0 and not others and not any(one.depth for one in first)
    if is_rest and costs.pass_over(last, sum(one.times.total_s for one in first[:last])):
        begin = last
    for place, records in enumerate(zip(*untold, strict=True)):
        if place >= begin:
            learn_costs(records, num_before + place, parts)


def learn_costs(records: Sequence[StepRecord], num_before: int, parts: Parts) -> None:
    """Correct the decoder's costs by what a round took.

    Args:
        records: Of the requests that shared it.
        num_before: Rounds that the oldest of them had before.
        parts: The parts.
    """
    costs, last = parts.memory.costs, records[0]
    if costs is None or not costs.is_due(_kind(records, num_before, parts), last.times.total_s):
        return
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


def _kind(records: Sequence[StepRecord], num_before: int, parts: Parts) -> RoundKind:
    """What kind the round was; asked about every one."""
    last = records[0]
    if len(records) == 1:
        if not last.depth:
            return RoundKind(_NOBODY, last.as_one, False, num_before)
        return RoundKind(_only(last.drafter), last.as_one, parts.runs_network(last.drafter), num_before)
    drafters = frozenset([record.drafter for record in records if record.depth])
    return RoundKind(drafters, last.as_one, any(map(parts.runs_network, drafters)), num_before)


@cache
def _only(drafter: str | None) -> frozenset[str | None]:
    return frozenset({drafter})
