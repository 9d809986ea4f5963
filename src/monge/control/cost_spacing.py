"""Which of many short rounds the table of costs learns from: learning is not to cost a percent."""

from typing import Final

Kind = tuple[frozenset[str | None], bool]
"""Who drafted, and whether the round ran as one."""

_SPACING_S: Final = 0.06
"""Seconds that go by between two rounds of a kind that are learnt from."""
_FIRST: Final = 64
"""Rounds that are all learnt from."""


class Spacing:
    """Rounds that were learnt from, by kind: where kinds take turns, each would else be news every time."""

    def __init__(self) -> None:
        self._clock_s = 0.0
        self._due_s: dict[Kind, float] = {}

    def takes(self, kind: Kind, seconds: float, num_learnt: int) -> bool:
        """Whether a finished round is to be learnt from.

        Args:
            kind: Of the round.
            seconds: What it took.
            num_learnt: Rounds that were learnt from so far.
        """
        self._clock_s += seconds
        if num_learnt >= _FIRST and self._clock_s < self._due_s.get(kind, 0.0):
            return False
        self._due_s[kind] = self._clock_s + _SPACING_S
        return True
