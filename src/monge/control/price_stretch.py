"""Rounds of a request that `price` plans alike and learns from together: learning from each takes time that short ones lack."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord

_FOLLOW_EVERY = 4  # rounds of which one follows what would have been looked up, where most of it would be refused


@dataclass(slots=True)
class Stretch:
    """Alike rounds of a request alone, noted in place.

    Args:
        plan: Of its rounds, but for those that keep the controller informed.
        blind: The same for most of them, which do not follow what would have been looked up; `None` where all do.
        num_rounds: With so many it ends.
        patience_s: Debt with which it ends before.
        seconds: Predicted seconds of a round by depth, from 0 on.
        whole_s: Those of a round that runs as one.
        lookups: Drafters without a network beside others, whose rounds say nothing about what those cost or gain.
        may_look_further: Whether their drafts can be deeper than the plan lets them be.
        debt_s: See `Request`.
        records: Its rounds so far.
        num_taught: How many of them have taught other requests already.
    """

    plan: DraftPlan
    blind: DraftPlan | None
    num_rounds: int
    patience_s: float
    seconds: Sequence[float]
    whole_s: float
    lookups: frozenset[str | None]
    may_look_further: bool
    debt_s: float
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    num_taught: int = 0

    @property
    def next_plan(self) -> DraftPlan:
        """Of the coming round."""
        return self.plan if self.blind is None or len(self.records) % _FOLLOW_EVERY == 0 else self.blind

    def takes(self, record: StepRecord) -> bool:
        """Whether the stretch goes on after a round, which is noted then."""
        records, depth = self.records, record.depth
        if len(records) + 1 >= self.num_rounds or record.batch_size > 1 or record.plan.max_depth == 0:
            return False
        if self._is_surprised(record):
            return False
        if record.drafter not in self.lookups:
            if depth >= len(self.seconds) or (not depth and record.levels_read):
                return False
            seconds = self.whole_s if record.as_one else self.seconds[depth]
            debt_s = self.debt_s + seconds - self.seconds[0] * (record.num_accepted + 1)
            if debt_s >= self.patience_s:
                return False
            self.debt_s = debt_s if debt_s > 0.0 else 0.0
        records.append(record)
        return True

    def _is_surprised(self, record: StepRecord) -> bool:
        """Whether looked-up candidates did otherwise than was planned for: texts begin to repeat themselves all at once."""
        if record.drafter in self.lookups:
            is_full = record.num_accepted == record.depth == self.plan.lookup_depth
            return record.num_accepted == 0 or (is_full and self.may_look_further)
        return any(entry.num_nodes and entry.factors[-1] > 0.0 for entry in record.hindsight)
