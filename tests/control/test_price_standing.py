"""Plans of `price` that stand for some rounds: what is learnt from these is what would be learnt from one after another."""

from dataclasses import replace

import pytest

from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.control.price import Price
from monge.control.price_batch import Crowd
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.core.context import DraftPlan
from monge.core.verdict import StepRecord
from tests.control.lookup_scripts import MEMBERS, follow
from tests.control.scripts import chain_round, draws


def memory_of(plain: float = 0.001, members=()) -> Memory:
    return Memory(CostModel.linear(plain=plain, node=0.02 * plain, draft=0.1 * plain), members=members)


def round_of(plan: DraftPlan, accepted: int, length: int) -> StepRecord:
    depth = plan.depth(4)
    taken = min(accepted, depth)
    return chain_round(depth, taken, plan=plan, confidences=(0.9,) * depth, levels_read=depth, context_length=length)


def decoded(
    controller: Price, memory: Memory, num_rounds: int, accepted: list[int], *, together: bool
) -> tuple[Request, list[int]]:
    """A request's state after some rounds, told of one by one or as its plans stand, and how long these stood."""
    state, length, stood = controller.init(memory), 40, list[int]()
    untold = list[StepRecord]()
    plan, left = DraftPlan(), 0
    for number in range(num_rounds):
        if not left:
            plan = controller.plan(state, draws())
            left = controller.stands([state], [plan], [length])
            stood.append(left)
        record = round_of(plan, accepted[number % len(accepted)], length)
        length += len(record.token_ids)
        left -= 1
        if together:
            untold.append(record)
            if not left:
                state, untold = controller.update_many(state, untold), []
        else:
            state = controller.update(state, record)
    return controller.update_many(state, untold), stood


def test_told_together_or_one_by_one_is_the_same() -> None:
    controller = Price()
    states, stood, known = [], [], []
    for together in (False, True):
        memory = memory_of()
        for _ in range(2):
            state, lengths = decoded(controller, memory, 100, [4, 3, 4, 2], together=together)
        states.append(replace(state, memory=Memory()))
        stood.append(lengths)
        known.append(pooled_of(memory).counts)
    assert stood[0] == stood[1]
    assert states[0] == states[1]
    assert known[0] == known[1]
    assert max(stood[0]) == 4
    assert sum(stood[0]) < 2 * 100


def test_no_plan_outlasts_the_rounds_that_keep_the_controller_informed() -> None:
    controller, memory = Price(), memory_of()
    decoded(controller, memory, 60, [4], together=True)
    _, stood = decoded(controller, memory, 45, [4], together=True)
    ends = {sum(stood[: place + 1]) for place in range(len(stood))}
    assert {14, 15, 31, 32} <= ends


def test_rounds_after_those_that_used_the_patience_up_are_learnt_from_with_them() -> None:
    controller, memory = Price(), memory_of()
    decoded(controller, memory, 60, [4], together=True)
    state, plan = controller.init(memory), None
    for _ in range(3):
        plan = controller.plan(state, draws())
        state = controller.update(state, round_of(plan, 4, 40))
    assert state.stretch is not None
    assert plan is not None
    state.stretch.patience_s = state.stretch.debt_s + 1e-9
    before = pooled_of(memory).num_rounds
    after = controller.update_many(state, [round_of(plan, 0, 52 + place) for place in range(4)])
    assert pooled_of(memory).num_rounds == before + 4
    assert after.rounds_on == 7
    assert after.context_length == 56


@pytest.mark.parametrize("resting_depth", [None, 0, 3])
def test_rests_stand_to_their_end_and_no_further(resting_depth: int | None) -> None:
    controller, memory = Price(), memory_of()
    state = Request(memory, context_length=40, off_left=19, off_tokens=19, resting_depth=resting_depth)
    length, done = 40, 0
    while state.off_left:
        plan = controller.plan(state, draws())
        num_rounds = controller.stands([state], [plan], [length])
        assert 1 <= num_rounds <= 8
        is_follower = resting_depth == 0 and done % 8 == 0
        assert (plan.lookup_depth, plan.follows) == ((resting_depth, True) if is_follower or resting_depth else (None, False))
        records = [round_of(plan, 0, length + place) for place in range(num_rounds)]
        state = controller.update_many(state, records)
        length, done = length + num_rounds, done + num_rounds
        assert done <= 19
    assert done == 19
    assert state.trial_left == controller.trial
    assert pooled_of(memory).rested == 19


def test_followers_of_lookups_stand_for_themselves() -> None:
    controller, memory = Price(), memory_of(members=MEMBERS)
    follow(controller, controller.init(memory), 60, found=True, looked=0, modelled=3)
    state, stood = controller.init(memory), list[tuple[bool, int]]()
    for _ in range(8):
        plan = controller.plan(state, draws())
        stood.append((plan.follows, controller.stands([state], [plan], [40])))
        _, state = follow(controller, state, 1, found=True, looked=0, modelled=3)
    assert stood == [(True, 1), (False, 3), (False, 2), (False, 1)] * 2


def test_requests_begin_as_the_last_ones_until_much_has_happened() -> None:
    controller, memory = Price(), memory_of()
    decoded(controller, memory, 120, [4, 3, 4, 2], together=True)
    outlooks = []
    for _ in range(40):
        begun = controller.init(memory)
        outlooks.append(begun.outlook)
        decoded(controller, memory, 5, [4, 3, 4, 2], together=True)
    assert 2 <= len({id(outlook) for outlook in outlooks}) <= 6
    pooled_of(memory).switch_off(64)
    assert controller.init(memory).outlook is not outlooks[-1], "what nobody drafts for any more is looked at anew"


def test_a_batch_rests_to_the_end_of_its_rest() -> None:
    controller, memory = Price(), memory_of()
    pooled, states = pooled_of(memory), [Request(memory, context_length=40, was_shared=True) for _ in range(3)]
    assert memory.costs is not None
    memory.costs.batch_size = 3
    pooled.crowd = Crowd(is_on=False, off_tokens=21, rested=1)
    stood = list[int]()
    while pooled.crowd.is_resting:
        plans = controller.plan_many(states, [draws()] * 3)
        assert [plan.max_depth for plan in plans] == [0, 0, 0]
        stood.append(controller.stands(states, plans, [40] * 3))
    assert stood == [8, 8, 4]
    assert (pooled.crowd.rested, pooled.rested) == (21, 20)
    plans = controller.plan_many(states, [draws()] * 3)
    assert any(plan.max_depth for plan in plans), "a trial, which does not stand"
    assert controller.stands(states, plans, [40] * 3) == 1


def test_requests_that_nobody_tells_of_leave_nothing_behind() -> None:
    """Those that do not want the controller's plans are begun all the same, and a server has them for weeks."""
    controller, memory = Price(), memory_of()
    decoded(controller, memory, 120, [4, 3, 4, 2], together=True)
    state, _ = decoded(controller, memory, 5, [4], together=True)
    for _ in range(50):
        controller.init(memory)
    assert len(pooled_of(memory).stretches) < 5
    assert state.stretch in pooled_of(memory).stretches, "from this one others have not learnt yet"
