import pytest

from monge.bench.statistics import (
    MAX_PERIOD,
    TAIL_TOKENS,
    RepeatSummary,
    geometric_mean,
    is_degenerate,
    paired_ratios,
    ratio_of_sums,
)
from monge.core.errors import MongeError


def test_summary():
    summary = RepeatSummary.of([3.0, 1.0, 2.0, 10.0])
    assert (summary.median, summary.low, summary.high) == (2.5, 1.0, 10.0)
    assert summary.iqr == pytest.approx(3.0)  # quartiles 1.75 and 4.75
    assert summary.values == (3.0, 1.0, 2.0, 10.0)
    with pytest.raises(MongeError, match="nothing was measured"):
        RepeatSummary.of([])


def test_ratios():
    # The machine was twice as slow in the second repeat: both sides are, and the ratio stays.
    assert paired_ratios([4.0, 2.0], [2.0, 1.0]) == (2.0, 2.0)
    found = ratio_of_sums([1 / 20, 1 / 20], [1 / 10, 1 / 30], range(2))
    assert found.mean == pytest.approx((2 / 20) / (1 / 10 + 1 / 30))
    assert (found.low, found.high) == pytest.approx((0.5, 1.5))
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


@pytest.mark.parametrize("period", [1, 2, MAX_PERIOD])
def test_loops_are_degenerate(period):
    looping = [100 + token % period for token in range(TAIL_TOKENS)]
    assert is_degenerate([*range(50), *looping])
    assert not is_degenerate([*range(50), *looping[:-1], 7])  # one token out of step at the end
    assert not is_degenerate(looping[1:])
    assert not is_degenerate([*looping, *range(TAIL_TOKENS)])  # only the end counts
    assert not is_degenerate([token % (MAX_PERIOD + 1) for token in range(99)])
