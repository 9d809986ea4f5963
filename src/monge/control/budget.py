"""Chooses the drafted tokens of a batch: it admits slots by survival while throughput grows.

A slot is (request, depth). Survival falls along a request, so every slot is ranked after its ancestors.
"""

from collections.abc import Callable, Sequence

Survivals = Sequence[Sequence[float]]
"""For each request, the survival by depth from 1 on; it decreases."""

Speed = Callable[[int], float]
"""Rounds per second as a function of the batch's tokens to verify, roots counted."""


def ranked(survivals: Survivals) -> list[tuple[int, int]]:
    """Return all slots, most probable first; ties by depth, then by request."""
    slots = [(row, depth) for row, values in enumerate(survivals) for depth in range(1, len(values) + 1)]
    return sorted(slots, key=lambda slot: (-survivals[slot[0]][slot[1] - 1], slot[1], slot[0]))


def first_stop(survivals: Survivals, speed: Speed) -> int:
    """Return the number of slots before the first one that lowers expected throughput.

    Whether a slot is admitted depends on slots of larger survival only. Survivals may therefore
    depend on the tokens above a slot, because nothing depends on the token of the slot itself.
    """
    tokens, count = float(len(survivals)), 0
    throughput = tokens * speed(len(survivals))
    for row, depth in ranked(survivals):
        tokens += survivals[row][depth - 1]
        following = tokens * speed(len(survivals) + count + 1)
        if following <= throughput:
            break
        throughput, count = following, count + 1
    return count


def best_count(survivals: Survivals, speed: Speed) -> int:
    """Return the number of slots with the largest expected tokens per second.

    It also considers descendants of slots that do not pay. With survivals of the present round's
    tokens this anticipates, and the output has the wrong law. Use survivals of earlier rounds.
    """
    tokens, best, largest = float(len(survivals)), 0, float(len(survivals)) * speed(len(survivals))
    for count, (row, depth) in enumerate(ranked(survivals), start=1):
        tokens += survivals[row][depth - 1]
        throughput = tokens * speed(len(survivals) + count)
        if throughput > largest:
            best, largest = count, throughput
    return best


def depths_of(survivals: Survivals, count: int) -> list[int]:
    """Return the depth of every request if the `count` slots of largest survival are admitted."""
    depths = [0] * len(survivals)
    for row, depth in ranked(survivals)[:count]:
        depths[row] = depth
    return depths
