"""What rounds that run as one cost, in plain rounds: both are measured often, and a slower moment makes both slower."""

import math
from dataclasses import dataclass
from typing import Final

from monge.core.errors import OptionError

_RATE: Final = 0.1
"""Part of the logarithm of measured / predicted that a round takes over."""
_BACK_RATE: Final = 0.3
"""The same behind a long rest: what was known is old, or the reason for that rest and wrong."""
_MOST: Final = 2.0
"""Largest factor between a measured round and what was predicted that is believed: a longer one was disturbed."""


@dataclass(slots=True)
class WholeCost:
    """The one depth at which a request's round may run as one, and its time there.

    Args:
        depth: That depth.
        plain_rounds: How many plain rounds behind the same text take as long.
        longest_text: Most tokens that the draft model may have to read first.

    Raises:
        OptionError: If a number is not positive and finite.
    """

    depth: int
    plain_rounds: float
    longest_text: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1 or not 0.0 < self.plain_rounds < math.inf:
            raise OptionError(
                f"costs: rounds as one need a depth >= 1 and a positive time; got {self.depth} and {self.plain_rounds}"
            )

    def learn(self, seconds: float, plain_s: float, *, is_cold: bool, is_back: bool = False) -> None:
        """Follow a measured round, given the seconds of a plain one.

        Args:
            seconds: What it took.
            plain_s: What a plain one takes.
            is_cold: Whether the round before it ran otherwise: code and weights are not at hand then, so that only a shorter
                time than expected says something.
            is_back: Whether it is one of a few behind a long rest.
        """
        if 0.0 < seconds < math.inf:
            factor = min(max(seconds / (self.plain_rounds * plain_s), 1.0 / _MOST), _MOST)
            rate = _BACK_RATE if is_back else _RATE
            self.plain_rounds *= min(factor, 1.0) ** rate if is_cold else factor**rate
