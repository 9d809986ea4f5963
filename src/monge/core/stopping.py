"""Stop rules: numbers in a plan with which a drafter ends a draft early.

They are exact with every verifier: the decision not to draw or read a level is made before any of
its candidates is drawn, and drawn tokens stay in the tree.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from monge.core.errors import OptionError

_LARGEST_LOGIT = 8.0
_SMALLEST_PROB = 1.0 / (1.0 + math.exp(_LARGEST_LOGIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Ends a draft if neither one more level nor several are expected to pay their price.

    *Confidence* is the largest probability that the draft network gives to a next token, at
    temperature 1. The chance that a candidate is accepted, given that its parent was, is taken to
    be `sigmoid((bias + slope * logit(confidence)) / T)` with the temperature T of its depth.
    *Reach* is the product of these chances along a path: the chance that the target gets there.

    All sequences are by depth of the level that is decided about, the root's children first; the
    last entry holds for deeper ones, and an empty sequence stands for zeros (`draw_prices`,
    `read_prices`) or ones (`temperatures`).

    Args:
        bias: See above.
        slope: See above.
        temperatures: See above.
        draw_prices: Expected accepted tokens that a level must promise, once its confidence is
            known, to be drawn.
        read_prices: The same before it is known, for the network to read one more level.
        expected: Mean acceptance of a level, given that it is reached; its length is the
            look-ahead.
        following: Intercept and slope of a level's chance, before its confidence is known, against
            that of the level above it; `None` where only averages are known.
        min_token_prob: A candidate with a smaller probability stays in the tree, but nothing is
            drafted below it.

    Raises:
        OptionError: If a number is NaN, a price or probability is negative, or a temperature is not
            positive.
    """

    bias: float = 0.0
    slope: float = 1.0
    temperatures: tuple[float, ...] = ()
    draw_prices: tuple[float, ...] = ()
    read_prices: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    following: tuple[float, float] | None = None
    min_token_prob: float | None = None

    def __post_init__(self) -> None:
        lowest = 0.0 if self.min_token_prob is None else self.min_token_prob
        positive = (*self.draw_prices, *self.read_prices, *self.expected, lowest)
        good = min(positive) >= 0.0 and min(self.temperatures, default=1.0) > 0.0
        # `min` may overlook NaN.
        if not good or any(
            map(
                math.isnan,
                (*positive, *self.temperatures, *(self.following or ()), self.bias, self.slope),
            )
        ):
            raise OptionError(
                "StopRule: numbers must not be NaN, prices not negative, "
                f"temperatures positive; got {self}"
            )

    @property
    def needs_confidence(self) -> bool:
        """True if it depends on the network's confidence."""
        return bool(self.draw_prices or self.read_prices)

    def acceptance(self, depth: int, confidence: float) -> float:
        """Return the acceptance at `depth` (from 1), given that the parent is accepted."""
        score = (self.bias + self.slope * logit(confidence)) / _at(self.temperatures, depth, 1.0)
        bounded = (
            _LARGEST_LOGIT
            if score > _LARGEST_LOGIT
            else -_LARGEST_LOGIT
            if score < -_LARGEST_LOGIT
            else score
        )
        return 1.0 / (1.0 + math.exp(-bounded))

    def next_acceptance(self, depth: int, last: float) -> float:
        """Return the same without the confidence, given the acceptance of the level above."""
        if self.following is None:
            return _at(self.expected, depth, last)
        intercept, slope = self.following
        return min(1.0, max(0.0, intercept + slope * last))

    def draws(self, depth: int, gain: float) -> bool:
        """Return whether candidates at `depth` with `gain` expected accepted tokens are drawn."""
        return self._pays(depth, gain, _at(self.draw_prices, depth, 0.0))

    def reads(self, depth: int, gain: float) -> bool:
        """Return whether the network reads on, for candidates at `depth`."""
        return self._pays(depth, gain, _at(self.read_prices, depth, 0.0))

    def _pays(self, depth: int, gain: float, price: float) -> bool:
        """Return whether this level pays its price, alone or with later levels.

        If the first node is expensive and further ones are cheap, one level alone may not pay.
        Later levels are assumed to have their mean acceptance.
        """
        left = gain - price
        for later in range(depth + 1, len(self.expected) + 1):
            if left >= 0.0:
                return True
            gain *= self.expected[later - 1]
            left += gain - _at(self.read_prices, later, 0.0)
        return left >= 0.0


@dataclass(slots=True)
class Evidence:
    """Confidences and probabilities of the draft network, by path of drafted tokens.

    Attributes:
        confidences: At every node that the network read, where the plan has prices.
        token_probs: What the network gave to every drawn candidate, where the plan has a threshold
            for it.
        levels_read: Levels that the network read.
    """

    confidences: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    token_probs: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    levels_read: int = 0

    def confidences_along(self, path: Sequence[int]) -> tuple[float, ...]:
        """Confidences at the nodes above a path's drafted tokens; empty where none were noted."""
        return _known(self.confidences.get(tuple(path[:depth])) for depth in range(len(path)))

    def token_probs_along(self, path: Sequence[int]) -> tuple[float, ...]:
        """Probabilities that the network gave to a path's tokens; empty if not noted."""
        return _known(self.token_probs.get(tuple(path[: depth + 1])) for depth in range(len(path)))


def logit(prob: float) -> float:
    """Log odds, bounded: a certain network is not infinitely certain."""
    if prob <= _SMALLEST_PROB:
        return -_LARGEST_LOGIT
    if prob >= 1.0 - _SMALLEST_PROB:
        return _LARGEST_LOGIT
    return math.log(prob / (1.0 - prob))


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _at(values: Sequence[float], depth: int, default: float) -> float:
    return values[min(depth, len(values)) - 1] if values else default
