"""Running totals, so that nothing is kept per round."""

from collections import Counter
from collections.abc import Sequence

from monge.core.verdict import StepRecord
from monge.serve.jobs import JobFinish, Speculation


class SpeculationTally:
    """What drafting was worth so far.

    Args:
        max_depth: Most tokens that a draft can have accepted.
    """

    def __init__(self, max_depth: int) -> None:
        self._histogram = [0] * (max_depth + 1)
        self._num_rounds = self._num_draft_tokens = 0

    def add(self, record: StepRecord) -> None:
        """Count a round of one request."""
        self._num_rounds += 1
        if record.num_nodes > 0:
            self._num_draft_tokens += record.num_nodes
            self._histogram[record.num_accepted] += 1

    def total(self) -> Speculation:
        """The figures."""
        return Speculation(
            num_rounds=self._num_rounds,
            num_drafts=sum(self._histogram),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(accepted * count for accepted, count in enumerate(self._histogram)),
            acceptance_histogram=tuple(self._histogram),
        )


class Totals:
    """What a scheduler has done since it was made.

    Args:
        max_depth: Most tokens that a draft can have accepted.
        planners: Who may have planned a round.
    """

    def __init__(self, max_depth: int, planners: Sequence[str]) -> None:
        self.speculation = SpeculationTally(max_depth)
        self.by_controller = {name: SpeculationTally(max_depth) for name in planners}
        self.finished: Counter[JobFinish] = Counter()
        self.num_prompt_tokens = self.num_generated_tokens = 0

    def add(self, record: StepRecord, planner: str) -> None:
        """Count a round of one request."""
        self.speculation.add(record)
        self.by_controller[planner].add(record)
