"""What rounds that run as one cost, against the same rounds stage by stage."""

import math
from dataclasses import dataclass
from typing import Final

from monge.core.errors import OptionError

_RATE: Final = 0.1
"""Part of the logarithm of measured / predicted that a round takes over."""
_MOST: Final = 2.0
"""Largest factor between a measured round and what was predicted that is believed: a longer one was disturbed."""


@dataclass(slots=True)
class WholeCost:
    """The one depth at which a request's round may run as one, and its time there.

    Args:
        depth: That depth.
        share: Seconds for one second of the same round stage by stage.

    Raises:
        OptionError: If a number is not positive and finite.
    """

    depth: int
    share: float

    def __post_init__(self) -> None:
        if self.depth < 1 or not 0.0 < self.share < math.inf:
            raise OptionError(f"costs: rounds as one need a depth >= 1 and a positive share; got {self.depth} and {self.share}")

    def learn(self, seconds: float, staged_s: float) -> None:
        """Follow a measured round, given what it is predicted to take stage by stage."""
        if 0.0 < seconds < math.inf:
            factor = min(max(seconds / (self.share * staged_s), 1.0 / _MOST), _MOST)
            self.share *= factor**_RATE
