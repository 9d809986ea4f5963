"""The smallest deviation that an audit finds."""

import math
from typing import Final

from scipy.stats import norm

_STAKE: Final = 3.4
"""Nats that the division of the first stake over bets and strengths costs the winning bet.

Measured, rounded up.
"""


def smallest_deviation(num_tokens: int, *, alpha: float, power: float = 0.9) -> float:
    """Return the smallest mean total variation that an audit of so many tokens finds with probability `power`.

    It holds for deviations that one of the bets describes. The bound is that of the hardest one,
    which moves mass between two halves of equal mass: its wealth grows by 2 d^2 nats a token at
    total variation d, with a standard deviation of 2 d.

    Args:
        num_tokens: Judged tokens.
        alpha: Largest probability of a false alarm.
        power: Probability of finding it.
    """
    if num_tokens == 0:
        return 1.0
    # n K - z sqrt(2 n K) = log(1 / alpha) + stake, solved for the root of n K, where K = 2 d^2.
    z, needed = float(norm.ppf(power)), math.log(1.0 / alpha) + _STAKE
    root = (z * math.sqrt(2.0) + math.sqrt(2.0 * z * z + 4.0 * needed)) / 2.0
    return min(1.0, root / math.sqrt(2.0 * num_tokens))
