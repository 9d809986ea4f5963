"""Predicts the times of replayed rounds from measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from monge.control.latency import Latency
from monge.core.verdict import StageTimes, StepRecord
from monge.replay.configuration import HEADS, MODEL
from monge.replay.log import LawLog


def untimed(log: LawLog, drafters: Sequence[str]) -> str | None:
    """Return why a log has no times of a configuration, or `None`."""
    missing = [drafter for drafter in drafters if log.costs and drafter not in log.costs]
    if not missing:
        return None
    again = "--draft of this model or head" if missing[0] in (MODEL, *HEADS) else f"--drafter {missing[0]}"
    return (
        f"no speeds: the log has no measured times of drafter {missing[0]!r} (it has: {', '.join(sorted(log.costs))}); "
        f"`monge replay record` with {again} measures them"
    )


def costs_for(log: LawLog, drafters: Sequence[str], nodes: Sequence[int]) -> Latency:
    """Return the latency of a drafter for trees with these nodes by depth; it does not learn.

    Of a pool it is the table of its draft model or head: what the other drafters need is part of every round.
    """
    table: Mapping[str, Any] = log.costs[next((name for name in (MODEL, *HEADS) if name in drafters), drafters[0])]
    model = Latency.from_dict({**table, "nodes": list(nodes)})
    model.learns = False
    return model


def predicted(record: StepRecord, costs: Latency, *, runs_network: bool) -> StepRecord:
    """Return the record with predicted instead of measured times.

    Args:
        record: A round.
        costs: The table.
        runs_network: Whether the table's time of drafting is that of the drafter which this round used.
    """
    drafting = costs.draft_s(record.depth) if record.depth and runs_network else 0.0
    rest = costs.verify_s(record.num_nodes, 1, record.context_length)
    times = StageTimes(draft_s=drafting, score_s=rest, total_s=drafting + rest, forward_s=drafting + rest)
    return replace(record, times=times)
