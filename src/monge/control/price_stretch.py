"""Rounds of a request that `price` plans alike and learns from together: learning from each takes time that short ones lack."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord


@dataclass(slots=True)
class Stretch:
    """Alike rounds of a request alone, noted in place.

    Args:
        plan: Of its rounds, but for those that keep the controller informed.
        num_rounds: With so many it ends.
        patience_s: Debt with which it ends before.
        seconds: Predicted seconds of a round by depth, from 0 on.
        whole_s: Those of a round that runs as one.
        debt_s: See `Request`.
        records: Its rounds so far.
        num_taught: How many of them have taught other requests already.
    """

    plan: DraftPlan
    num_rounds: int
    patience_s: float
    seconds: Sequence[float]
    whole_s: float
    debt_s: float
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    num_taught: int = 0

    def takes(self, record: StepRecord) -> bool:
        """Whether the stretch goes on after a round, which is noted then."""
        records, depth = self.records, record.depth
        if len(records) + 1 >= self.num_rounds or record.batch_size > 1 or not 0 < depth < len(self.seconds):
            return False
        seconds = self.whole_s if record.as_one else self.seconds[depth]
        debt_s = self.debt_s + seconds - self.seconds[0] * (record.num_accepted + 1)
        if debt_s >= self.patience_s:
            return False
        self.debt_s = debt_s if debt_s > 0.0 else 0.0
        records.append(record)
        return True
