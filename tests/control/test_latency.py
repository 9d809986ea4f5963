"""Seconds of rounds, learned from finished rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.control.latency import Latency
from tests.control.scripts import latency_of_rounds as learned


def test_before_any_round_a_deeper_draft_takes_longer_and_less_than_its_tokens_gain() -> None:
    seconds = Latency().rounds_s(8)
    assert seconds == sorted(seconds)
    assert 1.0 < seconds[1] / seconds[0] < 1.75


def test_the_shortest_recent_time_counts() -> None:
    assert learned((0, 1, 3.0), (0, 1, 1.0), (0, 1, 2.0)).round_s(0) == 1.0
    assert learned((0, 1, 1.0), *[(0, 1, 2.0)] * 3).round_s(0) == 2.0


def test_depths_between_measured_ones_lie_on_a_line_and_beyond_them_too() -> None:
    latency = learned((0, 1, 1.0), (4, 1, 2.0))
    assert latency.rounds_s(6) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5])


def test_a_depth_that_was_measured_once_or_twice_takes_no_longer_than_its_neighbours_say() -> None:
    """The first round of its kind may have to wait, as for a program that is compiled."""
    latency = learned((0, 1, 1.0), (4, 1, 2.0))
    for seconds, known in ((9.0, 1.5), (1.4, 1.4), (1.7, 1.4), (2.0, 1.4)):
        latency.observe(seconds, depth=2)
        assert latency.round_s(2) == known


def test_no_depth_takes_longer_than_a_deeper_one() -> None:
    """A machine that became faster while only deep drafts were measured was not slow for plain rounds."""
    assert learned((0, 1, 1.5), (2, 1, 1.4), (4, 1, 1.2)).rounds_s(4) == [1.2] * 5


def test_a_batch_size_borrows_the_proportions_of_the_nearest_one() -> None:
    latency = learned((0, 1, 1.0), (2, 1, 1.5), (0, 16, 4.0))
    assert latency.round_s(2, 16) == pytest.approx(6.0)
    assert latency.round_s(2, 9) == latency.round_s(2, 16), "sizes are rounded up to powers of two"
    assert latency.round_s(0, 64) == 4.0
    # A plain round that was not measured, in proportion to a draft that was.
    assert learned((0, 1, 1.0), (2, 1, 1.5), (2, 16, 6.0)).round_s(0, 16) == pytest.approx(4.0)


def test_drafters_of_a_pool_share_plain_rounds_alone() -> None:
    latency = learned((0, 1, 1.0), (2, 1, 3.0), drafter="model")
    assert latency.of("model", runs_network=True).round_s(2) == 3.0
    lookup = latency.of("ngram", runs_network=False)
    assert lookup.round_s(0) == 1.0
    assert 1.0 < lookup.round_s(2) < 3.0
    for _ in range(3):
        latency.observe(1.25, depth=2, drafter="ngram")
    assert lookup.round_s(2) == 1.25, "a view sees later rounds"


def test_fixed_times() -> None:
    linear = Latency.linear(plain=2.0, node=0.5, draft=1.0)
    assert linear.rounds_s(2) == pytest.approx([2.0, 3.5, 5.0])
    assert linear.of("ngram", runs_network=False).rounds_s(2) == pytest.approx([2.0, 2.5, 3.0])
    before = linear.rounds_s(3, 4)
    linear.observe(0.1, depth=0, batch_size=4)
    assert linear.rounds_s(3, 4) == before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_times_that_are_none_teach_nothing(seconds: float, batch_size: int) -> None:
    latency = learned((0, 1, 1.0), (3, 1, 1.5))
    before = latency.rounds_s(8, batch_size)
    latency.observe(seconds, depth=3, batch_size=batch_size)
    assert latency.rounds_s(8, batch_size) == before


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 70), st.floats(1e-6, 1e3)), max_size=12),
    st.integers(1, 70),
)
def test_all_times_are_positive_and_never_fall(
    rounds: list[tuple[int, int, float]], batch_size: int
) -> None:
    seconds = learned(*rounds).rounds_s(14, batch_size)
    assert all(math.isfinite(one) and one > 0.0 for one in seconds)
    assert all(
        after >= before * (1 - 1e-12) for before, after in zip(seconds, seconds[1:], strict=False)
    )
