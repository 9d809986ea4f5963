"""`monge tune` without networks: arms of known speeds, on a clock that they move."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from monge.bench.arms import Arm, DecodedCall, arms_of
from monge.bench.runner import Workload
from monge.bench.tune import grid, lengths, rounds_for, search
from monge.core.errors import OptionError

PAIR = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")))
WORK = Workload(prompts=((1,), (2,), (3,)), max_new_tokens=16, temperature=0.0, repeats=2)


class Machine:
    """A clock, what was decoded by it, and how slow the machine is at each call."""

    def __init__(self, slowness=lambda call: 1.0):
        self.now, self.calls, self.slowness = 0.0, [], slowness

    def clock(self):
        return self.now


class Simulated(Arm):
    """An arm of so many tokens per second, by prompt if there are several speeds."""

    def __init__(self, machine, name, *speeds, fails=None, length=None):
        super().__init__(name=name, settings={"drafter": name})
        self.machine, self.speeds, self.fails, self.length = machine, speeds, fails, length

    def decode(self, pair, call):
        machine = self.machine
        machine.calls.append((self.name, call))
        if self.fails is not None and machine.now >= self.fails:
            raise OptionError("does not fit")
        ((prompt,),) = call.prompt_ids
        tokens = min(call.max_new_tokens, self.length or call.max_new_tokens)
        speed = self.speeds[(prompt - 1) % len(self.speeds)]
        machine.now += machine.slowness(len(machine.calls)) * tokens / speed
        return DecodedCall(token_ids=((0,) * tokens,), records=(None,) * 4)


def found(machine, speeds, work=WORK, **options):
    plain = Simulated(machine, "none", 10.0)
    arms = [Simulated(machine, name, *of) for name, of in speeds.items()]
    return search(PAIR, plain, arms, work, clock=machine.clock, **options)


MANY = {f"arm {speed}": (float(speed),) for speed in range(5, 25)}


def test_the_fastest_half_stays_until_three_are_left():
    ranked = found(Machine(), MANY)
    assert [one.arm.name for one in ranked[:4]] == ["arm 24", "arm 23", "arm 22", "none"]
    # Two texts, then all three prompts a round, then two passes over them.
    assert {one.arm.name: len(one.seconds) for one in ranked} == {
        "none": 2 + 3 + 3 + 6,
        **{f"arm {speed}": 2 for speed in range(5, 15)},
        **{f"arm {speed}": 5 for speed in range(15, 20)},
        **{f"arm {speed}": 8 for speed in range(20, 22)},
        **{f"arm {speed}": 14 for speed in range(22, 25)},
    }
    assert list(rounds_for(20, 3, 2)) == [(20, 2), (10, 3), (5, 3), (3, 6)]
    best, plain = ranked[0], ranked[3]
    assert best.speed == pytest.approx(24.0)
    gain = best.speedup(plain, 3)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((2.4, 2.4, 2.4))


def test_all_decode_the_same_texts_by_turns_and_plain_decoding_in_every_round():
    machine = Machine()
    found(machine, MANY)
    warm_ups, timed = machine.calls[:21], machine.calls[21:]
    assert {call.max_new_tokens for _, call in warm_ups} == {16}
    names = [name for name, _ in timed]
    assert len(set(names[:21])) == 21
    assert names[:21] != names[21:42], "the order rotates"
    seeds = [call.seed for _, call in timed if _ == "none"]
    assert len(set(seeds)) == len(seeds), "a second pass draws other texts"
    assert {call.seed for _, call in timed[:21]} == {seeds[0]}
    others = [call.seed for name, call in timed if name == "arm 24"]
    assert others == seeds


def test_a_slow_minute_slows_all():
    """The machine is ten times slower for a while, in which every arm has a text or two."""
    slow = Machine(lambda call: 10.0 if 30 <= call < 50 else 1.0)
    speeds = {name: MANY[name] for name in ("arm 5", "arm 9", "arm 14", "arm 24")}
    ranked = found(slow, speeds, replace(WORK, repeats=5))
    assert ranked[0].arm.name == "arm 24"


def test_all_texts_decide_and_not_the_last_ones():
    """One is faster on one prompt, the other on two."""
    ranked = found(Machine(), {"one": (40.0, 5.0, 5.0), "all": (12.0, 12.0, 12.0)})
    assert ranked[0].arm.name == "all"
    interval = ranked[0].speedup(next(one for one in ranked if one.arm.name == "none"), 3)
    assert interval.mean == pytest.approx(1.2)
    (one,) = [one for one in ranked if one.arm.name == "one"]
    spread = one.speedup(next(one for one in ranked if one.arm.name == "none"), 3)
    assert spread.low < spread.mean < spread.high, "an interval over prompts"


def test_texts_of_other_lengths_are_compared_by_tokens():
    machine = Machine()
    plain, short = Simulated(machine, "none", 10.0), Simulated(machine, "short", 20.0, length=4)
    ranked = search(
        PAIR, plain, [short], replace(WORK, eos_ids=frozenset({9})), clock=machine.clock
    )
    assert [one.arm.name for one in ranked] == ["short", "none"]
    assert ranked[0].speedup(ranked[1], 3).mean == pytest.approx(2.0)


def test_drafts_that_do_not_pay_are_not_recommended():
    ranked = found(Machine(), {"slow": (9.0,), "slower": (3.0,)})
    assert [one.arm.name for one in ranked] == ["none", "slow", "slower"]


def test_an_arm_that_fails_is_left_out_and_says_why():
    machine = Machine()
    plain = Simulated(machine, "none", 10.0)
    arms = [
        Simulated(machine, "at once", 50.0, fails=0.0),
        Simulated(machine, "later", 50.0, fails=5.0),
        Simulated(machine, "well", 20.0),
    ]
    ranked = search(PAIR, plain, arms, WORK, clock=machine.clock)
    assert [one.arm.name for one in ranked if one.failure is None] == ["well", "none"]
    assert {one.arm.name: one.failure for one in ranked if one.failure} == {
        "at once": "OptionError: does not fit",
        "later": "OptionError: does not fit",
    }
    with pytest.raises(OptionError, match="plain decoding failed.*does not fit"):
        search(PAIR, Simulated(machine, "none", 1.0, fails=0.0), arms, WORK, clock=machine.clock)


def test_progress_counts_all_calls():
    told = []
    found(Machine(), MANY, on_call=lambda *words: told.append(words))
    (_, total), *calls = told
    assert len(calls) == total == 21 + 21 * 2 + 11 * 3 + 6 * 3 + 4 * 6
    assert calls[21] == ("round 1 of 4, 20 settings",)
    assert calls[-1] == ("round 4 of 4, 3 settings",)


def test_plain_decoding_says_how_long_the_texts_are():
    arm = Simulated(Machine(), "none", 10.0, length=7)
    assert lengths(PAIR, arm, WORK) == [7, 7, 7]


def test_the_grid_holds_the_defaults_and_every_drafter_once():
    further = ("none", "ngram", "pool('ngram', 'suffix')")
    tried = grid(drafter="head", is_greedy=True, further=further)
    greedy = [arm.settings for arm in arms_of(tried)]
    assert greedy[0] == {}
    names = [one["drafter"] for one in greedy[1:]]
    assert list(dict.fromkeys(names)) == ["ngram", "suffix", "head", "pool('ngram', 'suffix')"]
    assert all("verifier" not in one for one in greedy)
    assert {one["drafter"] for one in greedy[1:] if "tree" in one} == {"head"}
    sampled = [arm.settings for arm in arms_of(grid(drafter="model", is_greedy=False))]
    assert {"block", "traversal"} <= {one.get("verifier") for one in sampled}
    assert {"goodput", "fixed(max_depth=2)"} <= {one.get("controller") for one in sampled}
    assert "" not in grid(drafter=None, is_greedy=True), "the defaults are n-grams"
    with pytest.raises(OptionError, match="unknown drafter 'sufix'"):
        grid(drafter=None, is_greedy=True, further=("sufix",))
