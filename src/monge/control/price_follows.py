"""When a rest asks drafters without a network, or follows their would-be drafts: the more rarely, the less is found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.verdict import StepRecord

SOONEST: Final = 16
"""Tokens of a rest of which one's round asks or follows, at first: such a round takes some percent longer where rounds are
short."""
LATEST: Final = 256
"""The same at last."""
PATIENCE: Final = 16
"""Rounds in a row that ask, where what is found is worth it, and find nothing, before they do so as rarely."""


@dataclass(slots=True)
class Follows:
    """How often the rounds of a rest do so, changed in place.

    Args:
        gap: Tokens from one such round to the next.
        since: Tokens since the last one.
        vain: Rounds in a row that asked and found nothing.
    """

    gap: int = SOONEST
    since: int = 0
    vain: int = 0

    def left(self, depth: int) -> int:
        """Tokens until one is due, where what is looked up may be so deep; 0 where all are."""
        return max(0, self.gap - self.since) if depth == 0 or self.vain >= PATIENCE else 0

    def stand(self, depth: int) -> int:
        """For how many rounds in a row such a round may be planned."""
        return max(1, PATIENCE - self.vain) if depth else 1

    def begin(self) -> None:
        """Note that a request or a rest begins."""
        self.gap, self.since, self.vain = SOONEST, 0, 0

    def note(self, records: Sequence[StepRecord], num_tokens: int) -> None:
        """Note rounds of a rest, which wrote so many tokens."""
        if not any(one.plan.follows for one in records):
            self.since += num_tokens
            return
        for record in records:
            self._note(record)

    def _note(self, record: StepRecord) -> None:
        if not record.plan.follows:
            self.since += len(record.token_ids)
            return
        is_late = record.plan.lookup_depth == 0 or self.vain >= PATIENCE
        self.vain = 0 if record.num_nodes else self.vain + (record.plan.lookup_depth != 0)
        self.gap = min(2 * self.gap, LATEST) if is_late and not record.num_nodes else SOONEST
        self.since = len(record.token_ids)

    def found(self) -> None:
        """Note that text was found to repeat itself."""
        self.gap, self.vain = SOONEST, 0
