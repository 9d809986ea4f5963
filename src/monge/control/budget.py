"""Which drafted tokens of a batch are worth verifying together: slots ranked by survival, admitted while throughput grows.

A slot is (request, depth). Survival falls along a request, so every slot is ranked after its ancestors.
"""

from collections.abc import Callable, Sequence

Survivals = Sequence[Sequence[float]]
"""Of every request the chance, by depth from 1 on, that the target accepts that far; falling."""

Speed = Callable[[int], float]
"""Rounds per second as a function of the batch's tokens to verify, roots counted."""


def ranked(survivals: Survivals) -> list[tuple[int, int]]:
    """All slots, most probable first; among equals the shallower one, then the earlier request."""
    slots = [(row, depth) for row, values in enumerate(survivals) for depth in range(1, len(values) + 1)]
    return sorted(slots, key=lambda slot: (-survivals[slot[0]][slot[1] - 1], slot[1], slot[0]))


def first_stop(survivals: Survivals, speed: Speed) -> int:
    """Number of slots admitted before the first one that does not raise expected tokens per second.

    Whether a slot is admitted depends on slots of larger survival alone, so that survivals which look at the tokens drafted
    above a slot may be used: nothing depends on the slot's own token.
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
    """Number of slots of largest expected tokens per second.

    It looks past slots that do not pay, at their descendants: with survivals of the present round's tokens that is
    anticipating, and the output's law is wrong. Use survivals of earlier rounds.
    """
    tokens, best, largest = float(len(survivals)), 0, float(len(survivals)) * speed(len(survivals))
    for count, (row, depth) in enumerate(ranked(survivals), start=1):
        tokens += survivals[row][depth - 1]
        throughput = tokens * speed(len(survivals) + count)
        if throughput > largest:
            best, largest = count, throughput
    return best


def depths_of(survivals: Survivals, count: int) -> list[int]:
    """Depth of every request when the `count` slots of largest survival are admitted."""
    depths = [0] * len(survivals)
    for row, depth in ranked(survivals)[:count]:
        depths[row] = depth
    return depths
