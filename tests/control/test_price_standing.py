"""Plans of `price` that stand for some rounds: what is learnt from these is what would be learnt from one after another."""

from dataclasses import replace
from itertools import pairwise

import pytest

from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.control.price import Price
from monge.control.price_batch import Crowd
from monge.control.price_follows import PATIENCE, SOONEST
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.control.price_resting import STRIDE
from monge.core.context import DraftPlan
from monge.core.selection import Hindsight
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
    assert {31, 32} <= ends


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
    state = Request(memory, context_length=40, off_left=35, off_tokens=35, resting_depth=resting_depth)
    length, done, followed = 40, 0, list[int]()
    while state.off_left:
        plan = controller.plan(state, draws())
        num_rounds = controller.stands([state], [plan], [length])
        assert 1 <= num_rounds <= STRIDE
        assert (plan.lookup_depth, plan.follows) in [(None, False), (resting_depth, True)]
        followed += range(done, done + num_rounds * plan.follows)
        records = [round_of(plan, 0, length + place) for place in range(num_rounds)]
        state = controller.update_many(state, records)
        length, done = length + num_rounds, done + num_rounds
        assert done <= 35
    assert done == 35
    assert state.trial_left == controller.trial
    assert pooled_of(memory).rested == 35
    # Nothing was found: who asks in every round does so no longer after a while.
    assert followed == {None: [], 0: [SOONEST], 3: [*range(PATIENCE), PATIENCE - 1 + SOONEST]}[resting_depth]


@pytest.mark.parametrize("found", [0, 1, 2])
def test_the_longer_little_is_found_the_more_rarely_a_rest_follows(found: int) -> None:
    """One in 16 rounds at first, then one in 32, ... 256; where text repeats itself, and when another begins, in 16 again."""
    controller, memory = Price(), memory_of(members=MEMBERS)
    state = Request(memory, context_length=40, off_left=4000, off_tokens=4000, resting_depth=0)

    def followed(state: Request, found: int, num_rounds: int) -> tuple[list[int], Request]:
        places, since = list[int](), 0
        for place in range(num_rounds):
            plan = controller.plan(replace(state, resting_depth=0), draws())
            looked = (Hindsight(drafter="ngram", position=1, num_nodes=4, factors=(1.0,) * found + (0.0,)),)
            record = replace(round_of(plan, 0, 40 + place), hindsight=looked if since == 1 else ())
            state, since = controller.update(state, record), since + 1
            if plan.follows:
                places, since = [*places, place], 1
        return places, state

    places, state = followed(state, found, 1000)
    gaps = [after - before for before, after in pairwise([0, *places])]
    assert gaps == ([SOONEST] * 62 if found > 1 else [16, 32, 64, 128, 256, 256])
    begun = replace(state, context_length=None)
    (first, *_), _ = followed(begun, found, 100)
    assert first == SOONEST


def test_lookups_that_find_something_are_asked_in_every_round_again() -> None:
    controller, memory = Price(), memory_of(members=MEMBERS)
    state, asked = Request(memory, context_length=40, off_left=4000, off_tokens=4000, resting_depth=2), list[int]()
    for place in range(800):
        plan = controller.plan(replace(state, resting_depth=2), draws())
        found = plan.follows and place >= 100
        record = round_of(plan, 0, 40 + place)
        state = controller.update(state, replace(record, num_nodes=2, depth=2, drafter="ngram") if found else record)
        asked += [place] * plan.follows
    assert asked[:PATIENCE] == list(range(PATIENCE))
    late = asked[PATIENCE : next(place for place, one in enumerate(asked) if one >= 100)]
    assert late == [PATIENCE - 1 + SOONEST, PATIENCE - 1 + 3 * SOONEST]
    assert asked[PATIENCE + len(late) :] == list(range(PATIENCE - 1 + 7 * SOONEST, 800))


def test_followers_of_lookups_stand_for_themselves() -> None:
    controller, memory = Price(), memory_of(members=MEMBERS)
    follow(controller, controller.init(memory), 60, found=True, looked=0, modelled=3)
    state, stood = controller.init(memory), list[tuple[bool, int]]()
    for _ in range(8):
        plan = controller.plan(state, draws())
        stood.append((plan.follows, controller.stands([state], [plan], [40])))
        _, state = follow(controller, state, 1, found=True, looked=0, modelled=3)
    assert stood == [(True, 1), *((False, left) for left in (4, 4, 4, 4, 3, 2, 1))]


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
    assert stood == [STRIDE, 20 - STRIDE]
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


def looked_up(length: int, depth: int, accepted: int) -> StepRecord:
    plan = DraftPlan(max_depth=0, lookup_depth=depth, follows=True)
    return chain_round(depth, accepted, plan=plan, drafter="ngram", context_length=length)


def missed(length: int, accepted: int) -> StepRecord:
    """A round without candidates, which decided about what would have been looked up."""
    entry = Hindsight(drafter="ngram", position=length, num_nodes=4, factors=(*(1.0,) * accepted, 0.0))
    return chain_round(0, 0, plan=DraftPlan(max_depth=0), context_length=length, hindsight=(entry,))


@pytest.mark.parametrize(
    ("depth", "record", "is_news"),
    [
        (0, missed(50, 0), False),
        (0, missed(50, 1), True),
        (3, looked_up(50, 3, 0), True),
        (3, looked_up(50, 3, 2), False),
        (3, looked_up(50, 3, 3), True),
        (8, looked_up(50, 8, 8), False),
        (8, looked_up(50, 8, 0), True),
    ],
)
def test_what_is_looked_up_in_a_rest_is_news_where_others_may_be_planned(depth: int, record: StepRecord, is_news: bool) -> None:
    state = Request(memory_of(members=MEMBERS), context_length=50, off_left=100, off_tokens=100, resting_depth=depth)
    assert Price().is_news(state, record) is is_news


def test_what_is_no_news_in_a_rest_teaches_all_the_same() -> None:
    controller, states = Price(), list[Request]()
    records = [looked_up(50, 3, 2), looked_up(53, 3, 1), *(missed(length, 0) for length in range(55, 58)), looked_up(58, 3, 2)]
    for together in (False, True):
        memory = memory_of(members=MEMBERS)
        state = Request(memory, context_length=50, off_left=100, off_tokens=100, resting_depth=3)
        for some in [records] if together else [[record] for record in records]:
            state = controller.update_many(state, some)
        states.append(replace(state, memory=Memory(), rounds_on=0))
        assert pooled_of(memory).rested == 11
        assert (state.context_length, state.off_left) == (61, 89)
        assert sum(state.looked.reached) > 0
    assert states[0] == states[1]


def test_rounds_of_a_rest_that_end_it_begin_a_trial() -> None:
    controller, memory = Price(), memory_of(members=MEMBERS)
    state = Request(memory, context_length=50, off_left=4, off_tokens=4, resting_depth=3)
    state = controller.update_many(state, [looked_up(50, 3, 2), looked_up(53, 3, 2), looked_up(56, 3, 1)])
    assert (state.off_left, state.trial_left, state.rounds_on, state.context_length) == (0, controller.trial, 0, 58)


def test_a_lookup_that_would_have_found_a_lot_is_followed_on_at_once() -> None:
    controller, memory = Price(), memory_of(members=MEMBERS)
    follow(controller, controller.init(memory), 60, found=True, looked=0, modelled=3)
    state = controller.init(memory)
    plans, _ = follow(controller, state, 4, found=True, looked=2, modelled=3)
    assert [plan.follows for plan in plans] == [True] * 4
