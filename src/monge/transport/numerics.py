"""The border between two answers, to the last bit."""

from collections.abc import Callable


def bisect(is_past: Callable[[float], bool], low: float, high: float) -> float:
    """The border of a condition that is false left of it and true right of it, both ends included.

    It halves until the two sides are neighbouring floats, so there is no tolerance to choose.
    """
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return high
        if is_past(middle):
            high = middle
        else:
            low = middle
