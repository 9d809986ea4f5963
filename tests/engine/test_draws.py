"""Streams of random numbers: counted, apart from each other, and equal for equal seeds."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monge.core.errors import OptionError
from monge.laws.draws import (
    RequestDraws,
    SeededDraws,
    check_seed,
    num_drawn,
    random_numbers,
    stream_key,
)

STREAMS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
"""Seed and row."""


def test_draws_are_counted_and_looking_at_them_is_none():
    draws, plain = RequestDraws(3), RequestDraws(3)
    for place in range(600):
        assert num_drawn(draws) == place
        assert draws.peek(2)[0] == draws.uniform() == plain.uniform()


def test_controllers_draw_beside_the_stream():
    """The same numbers for every attempt at a round, others in the next, and no place of the stream is used up."""
    draws, plain = RequestDraws(5), RequestDraws(5)
    drawn = []
    for place in (3, 3, 4):
        draws.move_to(place)
        plans = draws.for_plans()
        drawn.append([plans.uniform() for _ in range(300)])
    assert drawn[0] == drawn[1]
    stream = [plain.uniform() for _ in range(300)]
    assert not set(drawn[0]) & set(drawn[2])
    assert not set(stream) & {*drawn[0], *drawn[2]}
    assert [draws.uniform() for _ in range(300)] == stream


def first(seed, row=0):
    draws = SeededDraws(seed, row)
    return [draws.uniform() for _ in range(4)]


@pytest.mark.parametrize("other", [5 + 2**32, 5 + 2**33, 5 + 2**63, -5])
def test_all_64_bits_of_a_seed_count(other):
    assert first(other) != first(5)
    assert RequestDraws(other).clocks(0, 0, 4).tolist() != RequestDraws(5).clocks(0, 0, 4).tolist()


def test_a_negative_seed_is_its_64_bits():
    assert first(-1) == first(2**64 - 1)
    assert first(-(2**63)) == first(2**63)


@given(STREAMS, STREAMS)
@example((5, 0), (5 + 2**32, 0))
@example((0, 1), (1, 0))
@example((2**64 - 1, 0), (0, 2**64 - 1))
def test_different_seeds_and_rows_have_different_streams(one, other):
    assert (stream_key(*one) == stream_key(*other)) == (one == other)
    assert (first(*one) == first(*other)) == (one == other)


@given(STREAMS, st.integers(1, 2**32), st.integers(1, 2**32))
def test_the_clocks_of_a_row_share_no_number_with_its_draws(stream, place, draft):
    apart = [
        random_numbers(*stream, **words).random(4)
        for words in ({}, {"use": 1}, {"place": place}, {"draft": draft})
    ]
    assert len({number for numbers in apart for number in numbers.tolist()}) == 16


@pytest.mark.parametrize(
    ("seed", "row", "message"),
    [
        (2**64, 0, "at least -2.63 and less than 2.64; got 18446744073709551616"),
        (-(2**63) - 1, 0, "seed must be a whole number of at least -2.63"),
        (0, -1, "row must be a whole number of at least 0 and less than 2.64; got -1"),
        (0, 2**64, "row must be a whole number"),
    ],
)
def test_seeds_and_rows_that_name_no_stream_are_refused(seed, row, message):
    with pytest.raises(OptionError, match=message):
        check_seed(seed, row)


def test_uniforms_are_uniform():
    draws = SeededDraws(1)
    counts = [0] * 16
    for _ in range(16_000):
        counts[int(16 * draws.uniform())] += 1
    # Chi square with 15 degrees of freedom: 0.1 %.
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 37.7
