"""Which texts are read in one forward, where each is padded to the longest of them."""

from collections.abc import Mapping
from typing import Final

_FORWARD: Final = 32  # tokens whose reading takes as long as what a forward costs in any case


def group_by_length(sizes: Mapping[int, int]) -> list[list[int]]:
    """Split texts into groups so that padding and forwards together cost least.

    A group costs its rows times its longest text, plus what a forward costs whatever it reads. The
    cheapest split is one of the texts in order of size, found by dynamic programming.

    Args:
        sizes: Tokens of every text, by its number.

    Returns:
        Numbers of each group, longest texts first.
    """
    keys = sorted(sizes, key=lambda key: -sizes[key])
    least, firsts = [0], [0]
    for stop in range(1, len(keys) + 1):
        cost, first = min(
            (least[first] + _FORWARD + (stop - first) * sizes[keys[first]], first)
            for first in range(stop)
        )
        least.append(cost)
        firsts.append(first)
    groups: list[list[int]] = []
    stop = len(keys)
    while stop:
        groups.append(keys[firsts[stop] : stop])
        stop = firsts[stop]
    return groups[::-1]
