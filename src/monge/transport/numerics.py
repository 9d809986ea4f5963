"""Two small tools that keep every digit.

The border between two answers, and a difference quotient without a difference.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float64

Real = TypeVar("Real", float, np.ndarray)


def bisect(
    is_past: Callable[[Float64[np.ndarray, " n"]], Bool[np.ndarray, " n"]],
    low: Float64[np.ndarray, " n"],
    high: Float64[np.ndarray, " n"],
) -> Float64[np.ndarray, " n"]:
    """The borders of conditions that are false left of them and true right of them, both ends included.

    It halves until the two sides are neighbouring floats, so there is no tolerance to choose.
    """
    while True:
        middle = 0.5 * (low + high)
        if not ((low < middle) & (middle < high)).any():
            return high
        past = is_past(middle)
        high = np.where(past, middle, high)
        low = np.where(past, low, middle)


def power_quotient(a: Real, b: Real, power: int) -> Real:
    """(b^n - a^n) / (b - a) as a sum of n products.

    The mean of n u^(n-1) between a and b, also where they meet.
    """
    total = b ** (power - 1)
    for degree in range(1, power):
        total = total + a**degree * b ** (power - 1 - degree)
    return total
