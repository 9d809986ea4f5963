"""Trials of `price`: as long as it is a near thing whether drafting pays, and short where each round loses much."""

from dataclasses import replace

import pytest

from monge.control.base import CostModel, Memory
from monge.control.price import Price
from monge.control.price_forecast import outlook_of
from monge.control.price_request import Request
from monge.control.survival import DepthCounts
from monge.core.verdict import RoundTiming
from tests.control.cost_scripts import kind
from tests.control.scripts import chain_round, draws, memory_of


def tried(acceptance: float, *, coming_s: float, trial: int = 1, last_off: int = 1024) -> int:
    """Rounds of a trial where drafts of one token cost 0.32 plain rounds and further ones more than they can bring."""
    controller, memory = Price(max_window=1, trial=trial, last_off=last_off), memory_of(draft=0.3)
    assert memory.costs is not None
    memory.costs.catch_up_s = coming_s
    state = Request(memory, counts=DepthCounts((1000.0,), (1000.0 * acceptance,)), context_length=40)
    outlook = outlook_of(state, 1)
    assert outlook.loss_s == pytest.approx(max(0.0, 0.32 - acceptance), abs=0.01)
    return controller._rests.trial_rounds(state, outlook)


def test_a_trial_loses_what_coming_back_costs_where_it_is_a_near_thing_and_less_elsewhere() -> None:
    # 0.77 and 0.89 of the speed of plain decoding: 0.60 and 0.79 of what coming back costs.
    assert tried(0.02, coming_s=1.5) == 3
    assert tried(0.17, coming_s=1.5) == 7
    assert tried(0.30, coming_s=1.5) == 16, "no more than so many"
    assert tried(0.50, coming_s=1.5) == 16
    assert tried(0.02, coming_s=0.0) == 1
    assert tried(0.02, coming_s=0.0, trial=3) == 3
    # Half a percent of a rest of 1024 tokens are 5.12 plain rounds, of which coming back may take nearly all, or more.
    assert tried(0.02, coming_s=4.5) == 2
    assert tried(0.50, coming_s=9.0) == 1
    assert tried(0.02, coming_s=1.5, last_off=350) == 1


def follow(memory: Memory, *, plain_rounds: float, survival: tuple[int, ...], num_rounds: int) -> list[bool]:
    """Which rounds drafted; those as one take so many plain ones by the clock, and accept what the sequence says in turns.

    A token that was decoded meanwhile takes the draft model a 25th of a plain round to read, up to 60 of them.
    """
    costs, controller, drafted = memory.costs, Price(), list[bool]()
    assert costs is not None
    state, length, unread = controller.init(memory), 40, 0
    for number in range(num_rounds):
        plan = controller.plan(state, draws())
        depth = 3 if plan.max_depth else 0
        seconds = 0.002 * (plain_rounds + min(unread, 60) / 25 if depth else 1.0)
        accepted = survival[len(drafted) % len(survival)] if depth else 0
        record = chain_round(depth, accepted, plan=plan, as_one=depth > 0, context_length=length, confidences=(0.7,) * depth)
        timing = RoundTiming(num_nodes=depth, depth=depth, batch_size=1, context_length=length, draft_s=0.0, rest_s=seconds)
        if costs.is_due(kind(*((None,) if depth else ()), as_one=depth > 0, num_before=number), seconds):
            (costs.observe_whole if depth else costs.observe)(timing)
        state, length, unread = controller.update(state, record), length + accepted + 1, 0 if depth else unread + 1
        drafted.append(depth > 0)
    return drafted


def wrong(plain_rounds: float) -> Memory:
    """Where rounds as one of three tokens were measured to take so many plain ones, and stages never pay."""
    costs = CostModel(verify_s={1: {0: 0.002, 8: 0.004}}, draft_s={1: {0: 0.0, 8: 0.08}})
    costs.note_whole(3, plain_rounds)
    costs.catch_up_s = 0.005
    return Memory(costs)


def test_a_table_that_is_wrong_about_drafting_is_found_out_in_rests() -> None:
    """A round as one was measured to take 3.4 plain ones and takes 2.1, for 2.6 tokens: it must not stay off for that."""
    drafted = follow(wrong(3.4), plain_rounds=2.1, survival=(3, 0, 2, 1, 2), num_rounds=1200)
    assert not all(drafted[40:60])
    assert sum(drafted[-300:]) > 270


def test_where_drafting_does_lose_little_trials_take_little() -> None:
    drafted = follow(wrong(2.7), plain_rounds=2.7, survival=(3, 0, 2, 1, 2), num_rounds=6000)
    # A round of 2.6 tokens loses 0.1 plain rounds.
    assert 0 < sum(drafted[1000:]) * 0.1 < 0.01 * 5000


def test_a_trial_that_loses_more_than_expected_ends_before() -> None:
    controller, memory = Price(), memory_of(draft=0.3)
    assert memory.costs is not None
    memory.costs.catch_up_s = 1.5
    state = replace(Request(memory, context_length=40), off_tokens=64, trial_left=16)
    rounds = 0
    while state.off_left == 0:
        plan = controller.plan(state, draws())
        state, rounds = controller.update(state, chain_round(1, 0, plan=plan, context_length=40 + rounds)), rounds + 1
    assert rounds == 5, "each loses 0.32 plain rounds"
    assert state.trial_left == 0
