"""Which rounds the table of costs learns from: those that show what going on costs, and of many short ones alike a few."""

from typing import Final

from monge.core.verdict import RoundKind

WARM: Final = 6
"""Plain rounds behind a network's draft that take longer than those after them: its weights and shapes are at hand, and the
target's are not. The first takes 4 to 30 percent longer, in rounds of one millisecond and of twelve alike, and who learnt from
those would take plain decoding for dear as long as drafting goes on."""
_RESTED: Final = 4
"""Rounds without a network's draft after which one finds weights, shapes and text not at hand: what that round takes beyond the
expected is the price of coming back, and no cost of going on."""
_LONG_REST: Final = 64
"""Rounds without a network's draft after which nobody knows any more what drafting costs."""
_BACK: Final = 16
"""Rounds with one behind such a rest of which those as one are all learnt from: there may be few before the next rest. They are
counted in plain rounds, whose cost they leave alone; those of stages would take it along, each a little."""
_BEGINNING: Final = 3
"""First rounds of a request, which take up to twice as long, whoever drafts: its prompt was read before them."""
_SPACING_S: Final = 0.06
"""Seconds that go by between two rounds of a kind that are learnt from: learning is not to cost a percent."""
_COLD_SPACING_S: Final = 0.24
"""The same of cold rounds, which are believed only where they are shorter than expected."""
_FIRST: Final = 64
"""Rounds that are all learnt from."""
_MOVED: Final = 0.05
"""Logarithm by which the cost of plain rounds may have moved unseen."""
_SOON: Final = 512
"""Rounds that lie at least between two times that it is asked for plain ones."""
_LATE: Final = 1024
"""Rounds after which it is asked for them in any case."""

_IN_VAIN: Final = 4 * WARM
"""Plain rounds in a row after which they are no longer asked for: where requests end within three rounds, none teaches."""

_PLAIN: Final = RoundKind(frozenset(), False, False, _BEGINNING)


class RoundWatch:
    """What is to be known of a round beside its time, to learn from it.

    It is told of every round, short ones too, so it does no more than note them; what was noted is read where one is learnt
    from.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        """Rounds so far."""
        self._before: RoundKind | None = None
        self._last: RoundKind | None = None
        self._num_rested = 0  # rounds without a network's draft before the last one
        self._num_plain = 0  # the same, the last one counted
        self._num_back = 0  # rounds with one that are still all learnt from
        self._clock_s = 0.0
        self._due_s: dict[tuple[frozenset[str | None], bool, bool], float] = {}
        self._num_learnt = 0
        self._age = 0  # rounds since a plain one was learnt from
        self._moved = 0.0  # logarithm of what plain rounds are taken to cost now over what they were then

    @property
    def has_switched(self) -> bool:
        """Whether one of the last two rounds ran as one, and the other did not."""
        return (self._before is not None and self._before.as_one) != (self._last is not None and self._last.as_one)

    @property
    def has_rested(self) -> bool:
        """Whether no network had drafted for some rounds before the last one."""
        return self._num_rested >= _RESTED

    @property
    def is_back(self) -> bool:
        """Whether a network drafts again, for the first few rounds after a long rest."""
        return self._num_back > 0

    @property
    def wants_plain(self) -> bool:
        """Whether nobody knows any more what plain rounds cost, until one was learnt from."""
        return self._age >= _SOON and (self._age >= _LATE or abs(self._moved) > _MOVED)

    def is_due(self, kind: RoundKind, seconds: float) -> bool:
        """Note a finished round; whether it is to be learnt from.

        Every kind is learnt from by itself: where kinds take turns, each would else be news every time. So is a first round
        after others, which is cold: what it says is not what the next one says.
        """
        drafters, as_one, runs_network, num_before = kind
        self._before, self._last = self._last, kind
        self._num_rested = self._num_plain
        if runs_network:
            self._num_plain, self._num_back = 0, _BACK if self._num_rested >= _LONG_REST else max(0, self._num_back - 1)
        else:
            self._num_plain += 1
        self.num_rounds += 1
        self._age = self._age + 1 if self._num_plain != _IN_VAIN else 0
        self._clock_s += seconds
        if num_before < _BEGINNING or (not drafters and self._num_plain <= WARM):
            return False
        is_cold = self.has_switched or (runs_network and self.has_rested)
        alike = drafters, as_one, is_cold
        is_news = self._num_learnt < _FIRST or (self._moved != 0.0 and not drafters) or (as_one and self.is_back)
        if not is_news and self._clock_s < self._due_s.get(alike, 0.0):
            return False
        self._due_s[alike] = self._clock_s + (_COLD_SPACING_S if is_cold else _SPACING_S)
        self._num_learnt += 1
        return True

    def pass_over(self, num_rounds: int, seconds: float) -> bool:
        """Note plain rounds in the middle of a rest that are not learnt from, since one behind them will say the same.

        Args:
            num_rounds: How many.
            seconds: What they took together.

        Returns:
            Whether they were noted; not where each may be news.
        """
        if self._num_plain <= _IN_VAIN or self._num_learnt < _FIRST or self._moved != 0.0:
            return False
        self._before, self._last = self._last if num_rounds == 1 else _PLAIN, _PLAIN
        self.num_rounds += num_rounds
        self._num_plain += num_rounds
        self._age += num_rounds
        self._clock_s += seconds
        return True

    def went_on(self, drafter: str | None) -> bool:
        """Whether a drafter of the last round had drafted in the one before, so that it had no text to read."""
        return self._before is None or drafter in self._before.drafters

    def learnt(self, moved: float, *, is_plain: bool) -> None:
        """Note that the last round was learnt from, with which the cost of plain ones moved by some logarithm."""
        if is_plain:
            self._age, self._moved = 0, 0.0
        else:
            self._moved += moved
