"""Times of rounds, and what controllers learn from them, are those of the clock in force."""

import itertools
import time

import pytest

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel
from monge.runtime.clock import measured_by, now


def ticking():
    ticks = itertools.count(0.0)
    return lambda: next(ticks)


def test_every_time_is_the_clocks():
    """A clock that ticks when it is read.

    Whole seconds everywhere, in the records and in the costs that were learnt.
    """
    target, draft = (TabularModel(RandomTable(4, seed), 4) for seed in (1, 2))
    with measured_by(ticking()):
        parts = make_components(target, draft, controller="goodput")
        (result,) = Decoder(parts).generate([(1, 2)], max_new_tokens=8, temperature=1.0, seed=0)
    for record in result.records:
        times = record.times
        assert times.draft_s >= 1.0
        assert times.draft_s + times.score_s + times.verify_s + times.commit_s == times.total_s
        assert times.total_s.is_integer()
    assert parts.shared.latency.round_s(0).is_integer()


def test_the_clock_is_put_back():
    def late():
        with measured_by(lambda: -1.0):
            assert now() == -1.0
            raise RuntimeError("late")

    with pytest.raises(RuntimeError):
        late()
    assert abs(now() - time.perf_counter()) < 60.0
