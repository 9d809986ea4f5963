"""How measured rounds compare with the cost table: by whether they verify a draft, by batch, and by length of the texts."""

import math
from dataclasses import dataclass, replace
from typing import Final

from monge.control.cost_table import OWN_RATE, log_ratio

_LARGEST_NEWS: Final = 1.5
"""Largest log-ratio that one round may show; the first of their kind may be far from what was expected."""
_HALF: Final = 16
"""Rounds after which a kind that is not met is half given up to what its other kind shows."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a kind: the logarithm of measured / predicted, rounds, and which one was the last."""

    ratio: float = 0.0
    count: int = 0
    last: int = 0

    def learnt(self, news: float, number: int) -> "_Known":
        """After a round of this kind."""
        # A mean of the first rounds: the slopes may be far off.
        return _Known(self.ratio + max(OWN_RATE, 1.0 / (1 + self.count)) * news, self.count + 1, number)

    def towards(self, other: float, number: int) -> "_Known":
        """After a round of the other kind, which stands at `other` now."""
        given_up = 1.0 - 0.5 ** ((number - self.last) / _HALF)
        share = given_up / _HALF if self.count else 1.0
        return _Known(self.ratio + share * (other - self.ratio), self.count, self.last)


_NOTHING: Final = _Known()


class Pace:
    """What is known of rounds, by their kind.

    What plain rounds take is taken for the machine's doing, so that those that verify a draft go along: only drafts say what
    drafts cost in plain rounds. Beyond that a kind that is not met for long goes with its other kind, plain rounds with those
    that verify a draft and the other way round: where plain rounds take a third of what was measured while the machine was
    busy, drafting does too, and it would hardly be tried to find that out.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bool, int, int], _Known] = {}
        self._num_rounds = 0
        self._drafting = 0.0  # where drafting stands, as one logarithm for all batches and lengths
        self._has_drafted = False

    def factor(self, drafts: bool, batch_size: int, context_length: int) -> float:
        """What the table's seconds are to be multiplied with."""
        return math.exp(self._known.get(_kind(drafts, batch_size, context_length), _NOTHING).ratio)

    def learn(self, drafts: bool, batch_size: int, context_length: int, seconds: float, predicted: float) -> float:
        """Learn from a round.

        Args:
            drafts: Whether it verified a draft.
            batch_size: Its requests.
            context_length: Length of their texts.
            seconds: What it took.
            predicted: What was expected, `factor` included.

        Returns:
            After a plain round, the factor by which drafting is taken to be dearer than before it; 1 otherwise.
        """
        self._num_rounds += 1
        met, unmet = _kind(drafts, batch_size, context_length), _kind(not drafts, batch_size, context_length)
        news = log_ratio(seconds, predicted, _LARGEST_NEWS)
        stood_met, before = self._known.get(met, _NOTHING), self._known.get(unmet, _NOTHING)
        known = self._known[met] = stood_met.learnt(news, self._num_rounds)
        if not drafts:
            before = replace(before, ratio=before.ratio + known.ratio - stood_met.ratio)
        after = self._known[unmet] = before.towards(known.ratio, self._num_rounds)
        if drafts:
            self._drafting, self._has_drafted = known.ratio, True
        elif before.count or not self._has_drafted:
            # Other batches and lengths tell the same news again; where nothing was drafted yet they say nothing new.
            stood, self._drafting = self._drafting, after.ratio
            return math.exp(after.ratio - stood)
        return 1.0


def _kind(drafts: bool, batch_size: int, context_length: int) -> tuple[bool, int, int]:
    """Rounds whose texts cost alike: drafts or none, batch and context within a factor of two."""
    return drafts, batch_size.bit_length(), context_length.bit_length()
