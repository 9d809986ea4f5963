"""Which rounds `price` plans apart to stay informed."""

from itertools import pairwise

import pytest

from monge.control.price_apart import Apart
from monge.control.price_outlook import Outlook


def outlook(whole_s: float | None) -> Outlook:
    """Rounds of two windows, the larger of which may run as one in so many seconds."""
    whole = None if whole_s is None else (2, whole_s)
    return Outlook.of((0.5, 0.5), [1.0, 1.5, 1.75], seconds=[1.0, 1.2, 1.4], verifying=[1.0, 1.1, 1.2], price=1.0, whole=whole)


@pytest.mark.parametrize(
    ("whole_s", "explored", "as_one"),
    [(None, [31, 95], []), (9.0, [31, 95], [14, 15, 46, 47, 78, 79, 110, 111]), (1.0, [31], [])],
)
def test_rounds_apart(whole_s: float | None, explored: list[int], as_one: list[int]) -> None:
    """Where rounds run as one, two of 32 need not be tried, and confidence is asked for in one of 128 instead of 64."""
    apart = Apart.of(outlook(whole_s))
    assert [number for number in range(128) if apart.explores(number)] == explored
    assert [number for number in range(128) if apart.is_whole(number)] == as_one


@pytest.mark.parametrize("whole_s", [None, 9.0, 1.0])
def test_plans_stand_up_to_the_next_of_them(whole_s: float | None) -> None:
    apart = Apart.of(outlook(whole_s))
    places = [number for number in range(400) if apart.explores(number) or apart.is_whole(number)]
    assert [number for number in range(400) if apart.before(number) == 0] == places
    for before, after in pairwise(places):
        assert [apart.before(number) for number in range(before + 1, after)] == list(range(after - before - 1, 0, -1))
