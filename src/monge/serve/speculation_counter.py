"""Counters of speculation."""

from collections import Counter
from collections.abc import Sequence

from monge.core.verdict import StepRecord
from monge.serve.generation import GenerationFinish, Speculation


class SpeculationCounter:
    """Counts drafted and accepted tokens.

    Args:
        max_depth: Largest number of accepted tokens of a draft.
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
        """Return the figures."""
        return Speculation(
            num_rounds=self._num_rounds,
            num_drafts=sum(self._histogram),
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(accepted * count for accepted, count in enumerate(self._histogram)),
            acceptance_histogram=tuple(self._histogram),
        )


class Totals:
    """Totals of a scheduler since its start.

    Args:
        max_depth: Largest number of accepted tokens of a draft.
        controllers: Names of the controllers that may plan a round.
    """

    def __init__(self, max_depth: int, controllers: Sequence[str]) -> None:
        self.speculation = SpeculationCounter(max_depth)
        self.by_controller = {name: SpeculationCounter(max_depth) for name in controllers}
        self.finished: Counter[GenerationFinish] = Counter()
        self.num_prompt_tokens = self.num_generated_tokens = 0

    def add(self, record: StepRecord, controller: str) -> None:
        """Count a round of one request."""
        self.speculation.add(record)
        self.by_controller[controller].add(record)
