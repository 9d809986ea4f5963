"""Rounds that `price` plans apart from those around them, to stay informed: what is not tried is known from old times only."""

from dataclasses import dataclass
from typing import Final

from monge.control.price_outlook import Outlook

_EXPLORES: Final = 64
_EXPLORES_AS_ONE: Final = 128  # such rounds ask for no confidence
_EXPLORES_AT: Final = 31  # the first one soon
_WHOLE_EVERY: Final = 32
_WHOLE_AT: Final = 14  # and once more behind it: the first one is slower than those that follow


@dataclass(frozen=True, slots=True)
class Apart:
    """Which rounds those are, counted since drafting began.

    Args:
        explores_every: Of so many rounds one drafts without looking at confidence.
        runs_as_one: Whether two of 32 run as one, since others run stage by stage.
    """

    explores_every: int = _EXPLORES
    runs_as_one: bool = False

    @classmethod
    def of(cls, outlook: Outlook) -> "Apart":
        """Where rounds are expected to bring this."""
        if outlook.as_one:
            return cls(_EXPLORES_AS_ONE)
        return cls(runs_as_one=outlook.whole is not None)

    def explores(self, round_number: int) -> bool:
        """Whether a round drafts without looking at confidence."""
        return round_number % self.explores_every == _EXPLORES_AT

    def is_whole(self, round_number: int) -> bool:
        """Whether a round runs as one though stages are ahead."""
        return self.runs_as_one and round_number % _WHOLE_EVERY in (_WHOLE_AT, _WHOLE_AT + 1)

    def before(self, round_number: int) -> int:
        """Rounds from this one on until the next one that is planned apart; 0 where this one is."""
        left = (_EXPLORES_AT - round_number) % self.explores_every
        if not self.runs_as_one:
            return left
        return 0 if self.is_whole(round_number) else min(left, (_WHOLE_AT - round_number) % _WHOLE_EVERY)
