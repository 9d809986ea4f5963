"""Seconds of rounds by drafted nodes and by depth, and the times of replayed rounds that they predict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from monge.control.latency import Latency
from monge.core.verdict import StageTimes, StepRecord
from monge.engine.components import Components
from monge.replay.configuration import HEADS, MODEL
from monge.replay.log import LawLog

Table = Mapping[int, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Measured seconds of rounds. What lies between two entries is on the line through them.

    Args:
        verify: Seconds without drafting, by batch size and drafted nodes; 0 nodes is plain decoding.
        draft: Seconds of drafting, by batch size and depth.
    """

    verify: Table
    draft: Table

    @classmethod
    def linear(cls, *, plain: float, node: float, draft: float) -> "RoundCosts":
        """Return costs of `plain` seconds, `node` more by drafted node, and `draft` by level."""
        return cls({1: {0: plain, 1: plain + node}}, {1: {0: 0.0, 1: draft}})

    def verify_s(self, num_nodes: int, batch_size: int = 1) -> float:
        """Return the seconds of a round without its drafting."""
        return _interpolated(self.verify, batch_size, num_nodes)

    def draft_s(self, depth: int, batch_size: int = 1) -> float:
        """Return the seconds of drafting."""
        return _interpolated(self.draft, batch_size, depth)

    def scaled(self, batch_size: int, factor: float) -> "RoundCosts":
        """Return costs in which rounds of one batch size take `factor` times as long."""

        def within(table: Table) -> Table:
            row = {at: seconds * factor for at, seconds in table[batch_size].items()}
            return {**table, batch_size: row}

        return RoundCosts(within(self.verify), within(self.draft))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RoundCosts":
        """Return the inverse of `as_dict`, read from JSON, whose keys are text."""
        verify, draft = (
            {
                int(batch): {int(at): float(seconds) for at, seconds in row.items()}
                for batch, row in values[name].items()
            }
            for name in ("verify", "draft")
        )
        return cls(verify, draft)


def untimed(log: LawLog, drafters: Sequence[str]) -> str | None:
    """Return why a log has no times of a configuration, or `None`."""
    missing = [drafter for drafter in drafters if log.costs and drafter not in log.costs]
    if not missing:
        return None
    name, known = missing[0], ", ".join(sorted(log.costs))
    again = "--draft of this model or head" if name in (MODEL, *HEADS) else f"--drafter {name}"
    return (
        f"no speeds: the log has no measured times of drafter {name!r} (it has: {known}); "
        f"`monge replay record` with {again} measures them"
    )


def costs_for(log: LawLog, drafters: Sequence[str]) -> RoundCosts:
    """Return the costs of a drafter; of a pool those of its draft model or head."""
    name = next((name for name in (MODEL, *HEADS) if name in drafters), drafters[0])
    return RoundCosts.from_dict(log.costs[name])


def fixed_latency(costs: RoundCosts, components: Components, nodes: Sequence[int]) -> Latency:
    """Return the times by depth that controllers are told; they stay as they are.

    `nodes` are drafted nodes of depth 0, 1, ... of the drafter that runs the network. Model-free drafters
    of a pool draft chains, in no time.
    """
    drafters = [(member.name, member.runs_network) for member in components.shared.members]
    latency = Latency()
    for name, runs_network in drafters or [(None, True)]:
        for depth, num_nodes in enumerate(nodes):
            seconds = costs.verify_s(num_nodes if runs_network else depth)
            if runs_network:
                seconds += costs.draft_s(depth)
            latency.observe(seconds, depth=depth, drafter=name)
    latency.learns = False
    return latency


def predicted(record: StepRecord, costs: RoundCosts, *, runs_network: bool) -> StepRecord:
    """Return a round with predicted instead of measured times.

    `runs_network` says whether its drafter has the drafting costs.
    """
    drafting = costs.draft_s(record.depth) if runs_network else 0.0
    rest = costs.verify_s(record.num_nodes)
    times = StageTimes(
        draft_s=drafting, score_s=rest, total_s=drafting + rest, forward_s=drafting + rest
    )
    return replace(record, times=times)


def _interpolated(table: Table, batch_size: int, at: int) -> float:
    return _on_line({batch: _on_line(row, at) for batch, row in table.items()}, batch_size)


def _on_line(row: Mapping[int, float], at: int) -> float:
    """Return the value on the lines through the entries; constant before the first."""
    places = sorted(row)
    if len(places) == 1 or at <= places[0]:
        return row[places[0]]
    low, high = next(
        (pair for pair in zip(places, places[1:], strict=False) if at <= pair[1]), places[-2:]
    )
    return row[low] + (row[high] - row[low]) * (at - low) / (high - low)
