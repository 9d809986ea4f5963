import gc
from dataclasses import dataclass

import pytest

from monge.bench import runner
from monge.bench.arms import Arm, Call, DecodedCall
from monge.bench.runner import WARM_UP_TOKENS, Settings, Workload, measure
from monge.core.errors import MongeError, OptionError
from monge.runtime.clock import now

PROMPTS = ((1, 2), (3,), (4, 5, 6))


@dataclass(kw_only=True)
class Scripted(Arm):
    """Writes down its calls; fails or stops short where it is told to."""

    log: list[tuple[str, Call]]
    missing: int = 0
    fails_at_call: int | None = None
    error: type[Exception] = OptionError

    def decode(self, pair, call):
        mine = sum(name == self.name for name, _ in self.log)
        self.log.append((self.name, call))
        if mine == self.fails_at_call:
            raise self.error("no room")
        row = (7,) * (call.max_new_tokens - self.missing)
        return DecodedCall(token_ids=(row,) * len(call.prompt_ids))


def run(tiny_pair, arms, **settings):
    defaults = {"max_new_tokens": 20, "repeats": 2, "temperatures": (0.0,), "batch_sizes": (1,)}
    return measure(
        tiny_pair, arms, PROMPTS, Settings(**(defaults | settings)), on_call=lambda *_: None
    )


def test_arms_take_turns_in_rotating_order(tiny_pair):
    log = []
    measurement, *_ = run(tiny_pair, [Scripted(name=name, log=log) for name in "abc"])
    names = "".join(name for name, _ in log)
    # Warm-up, then two repeats of three prompts.
    assert names == "abc" + "abc" + "bca" + "cab" + "bca" + "cab" + "abc"
    lengths = [call.max_new_tokens for name, call in log if name == "a"]
    assert lengths == [WARM_UP_TOKENS] + [20] * 6
    # The warm-up is not counted.
    assert measurement.num_tokens == [20] * 6
    seconds = measurement.seconds
    assert (len(seconds), len(measurement.completions)) == (6, 6)
    assert measurement.seconds_of_repeats == [sum(seconds[:3]), sum(seconds[3:])]
    assert measurement.tokens_per_s == (60 / sum(seconds[:3]), 60 / sum(seconds[3:]))


def test_all_arms_get_the_same_calls(tiny_pair):
    log, arms = [], "ab"
    made = [Scripted(name=name, log=log) for name in arms]
    settings = {"temperatures": (0.0, 1.0, 0.0), "batch_sizes": (1, 2, 1)}
    assert len(run(tiny_pair, made, **settings)) == 2 * 2 * 2, "a value given twice counts once"
    calls = {arm: sorted(repr(call) for name, call in log if name == arm) for arm in arms}
    assert calls["a"] == calls["b"]
    seeds = {call.seed for _, call in log}
    assert len(seeds) == 2 * 3  # one per repeat and batch; temperatures and arms share them
    work = {"prompts": PROMPTS, "max_new_tokens": 1, "temperature": 0.0}
    assert Workload(**work, batch_size=2).batches == [((1, 2), (3,)), ((4, 5, 6), (1, 2))]
    assert Workload(**work, batch_size=8).batches == [(PROMPTS * 3)[:8]]


@pytest.mark.parametrize(("error", "at"), [(OptionError, 0), (RuntimeError, 3), (IndexError, 3)])
def test_failed_arm_has_a_reason_and_no_numbers(tiny_pair, error, at):
    log = []
    arms = [Scripted(name="a", log=log, fails_at_call=at, error=error), Scripted(name="b", log=log)]
    failed, fine = run(tiny_pair, arms)
    assert failed.failure == f"{error.__name__}: no room"
    assert not failed.seconds
    assert not failed.num_tokens
    assert not failed.completions
    assert sum(name == "a" for name, _ in log) == at + 1, "a failed arm is not asked again"
    assert fine.num_tokens == [20] * 6
    with pytest.raises(ZeroDivisionError):  # a fault of the benchmark is not swallowed
        run(tiny_pair, [Scripted(name="a", log=[], fails_at_call=0, error=ZeroDivisionError)])


def test_short_output_is_a_failure(tiny_pair):
    (measurement,) = run(tiny_pair, [Scripted(name="a", log=[], missing=1)])
    reason = f"gave {WARM_UP_TOKENS - 1} tokens where {WARM_UP_TOKENS} were asked for"
    assert measurement.failure == f"{reason}, so it cannot be compared"


def test_batch_that_an_arm_cannot_take_is_not_tried(tiny_pair):
    log = []
    one, many = run(tiny_pair, [Scripted(name="a", log=log, max_batch_size=1)], batch_sizes=(1, 2))
    assert one.failure is None
    assert many.failure == "not applicable: this arm decodes at most 1 sequence(s) at a time"
    assert all(len(call.prompt_ids) == 1 for _, call in log)


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_arms_and_controllers_measure_by_the_clock(tiny_pair, clock, monkeypatch):
    ticks, seen = iter(range(100)), []

    class Asking(Scripted):
        def prepare(self, pair):
            seen.append(now())

    clocks = {"wall": lambda: -5.0, "cpu": lambda: -5.0} | {clock: lambda: float(next(ticks))}
    monkeypatch.setattr(runner, "CLOCKS", clocks)
    (measurement,) = run(tiny_pair, [Asking(name="a", log=[])], clock=clock)
    assert measurement.seconds == [1.0] * 6  # a tick passes in each call
    assert seen == [0.0]
    assert now() > 100


def test_time_limit_ends_after_a_whole_repeat(tiny_pair):
    (measurement,) = run(tiny_pair, [Scripted(name="a", log=[])], repeats=50, time_limit_s=0.0)
    assert measurement.num_tokens == [20] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"repeats": 0}, "at least 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"batch_sizes": (0,)}, "at least 1"),
        ({"batch_sizes": ()}, "at least 1"),
        ({"clock": "sundial"}, "sundial.*wall"),
    ],
)
def test_bad_settings(wrong, message):
    with pytest.raises(MongeError, match=message):
        Settings(**wrong)


def test_no_arm_pays_for_garbage_of_what_was_loaded(tiny_pair):
    @dataclass(kw_only=True)
    class Looking(Scripted):
        def decode(self, pair, call):
            frozen.append(gc.get_freeze_count())
            return super().decode(pair, call)

    frozen, before = [], gc.get_freeze_count()
    run(tiny_pair, [Looking(name="a", log=[])])
    assert all(count > before + 10_000 for count in frozen[1:]), "all calls but the warm-up"
    assert gc.get_freeze_count() == 0
