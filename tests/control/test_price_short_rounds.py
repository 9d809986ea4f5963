"""`price` where rounds are short: requests begin by what others taught, and lookups are planned anew without a whole look."""

from dataclasses import replace

import pytest

from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.control.price import Price
from monge.control.price_forecast import outlook_of
from monge.control.price_learning import teach_left
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.core.context import DraftPlan
from monge.core.selection import Member
from tests.control.lookup_scripts import MEMBERS, follow
from tests.control.scripts import chain_round, draws

SHORT, LONG = 0.001, 1.0


def memory_of(plain: float, members: tuple[Member, ...] = ()) -> Memory:
    return Memory(CostModel.linear(plain=plain, node=0.02 * plain, draft=0.1 * plain), members=members)


def decoded(controller: Price, memory: Memory, num_rounds: int, plain: int | None = None) -> Request:
    """A request of some rounds without a choice of drafters, most of whose tokens are accepted; one of them may be plain."""
    state = controller.init(memory)
    for number in range(num_rounds):
        plan = DraftPlan(max_depth=0) if number == plain else controller.plan(state, draws())
        depth = plan.depth(4)
        record = chain_round(depth, min(depth, number % 5), plan=plan, confidences=(0.9,) * depth, levels_read=depth)
        state = controller.update(state, replace(record, context_length=40 + 4 * number))
    return state


def test_the_first_round_of_a_request_is_not_looked_at_once_others_have_taught() -> None:
    controller, memory = Price(), memory_of(SHORT)
    assert controller.init(memory).stretch is None, "nobody has taught yet"
    decoded(controller, memory, 40)
    state = controller.init(memory)
    assert state.stretch is not None
    plan = controller.plan(state, draws())
    assert plan == state.stretch.plan
    after = controller.update(state, chain_round(4, 3, plan=plan, confidences=(0.9,) * 4, levels_read=4))
    assert after is state
    assert memory.costs is not None
    memory.costs.batch_size = 2
    assert controller.init(memory).stretch is None, "neighbours decide together"


def test_requests_that_begin_so_teach_as_others_do() -> None:
    controller = Price()
    memories = [memory_of(plain) for plain in (LONG, SHORT)]
    for memory in memories:
        for num_rounds in (30, 7, 50):
            decoded(controller, memory, num_rounds, plain=4)
        teach_left(memory)
    slow, fast = map(pooled_of, memories)
    assert fast.spells.length == pytest.approx(slow.spells.length, rel=1e-3), "requests that end early teach a little later"
    assert (fast.spells.count, fast.spells.guessed) == (slow.spells.count, slow.spells.guessed)
    assert fast.spells.count > 2.5
    assert sum(fast.counts.reached) == pytest.approx(sum(slow.counts.reached), rel=0.2)


def test_lookups_are_planned_anew_in_the_middle_of_alike_rounds() -> None:
    controller, memory = Price(), memory_of(SHORT, MEMBERS)
    follow(controller, controller.init(memory), 60, found=True, looked=0, modelled=3)
    state = controller.init(memory)
    begun = state.stretch
    assert begun is not None
    assert (begun.plan.lookup_depth, begun.blind is not None) == (0, True), "most rounds need not follow what is refused"
    plans, state = follow(controller, state, 12, found=True, looked=8, modelled=3)
    assert state.stretch is begun, "no look was needed"
    assert (plans[-1].lookup_depth or 0) > 3
    assert begun.blind is None
    looked = state.looked.seen(begun.drafts, 0.9)
    assert begun.plan.lookup_depth == begun.outlook.with_looked(looked).lookup_depth
    plans, state = follow(controller, state, 8, found=True, looked=0, modelled=3, context=300)
    assert state.stretch is begun
    assert plans[-1].lookup_depth == 0
    assert len(begun.records) == 20


def test_a_request_that_ends_teaches_what_it_looked_up() -> None:
    controller, memory = Price(), memory_of(SHORT, MEMBERS)
    follow(controller, controller.init(memory), 40, found=True, looked=0, modelled=3)
    known = pooled_of(memory).looked
    _, state = follow(controller, controller.init(memory), 6, found=True, looked=0, modelled=3)
    teach_left(memory)
    taught = pooled_of(memory).looked
    assert sum(taught.reached) > sum(known.reached)
    controller.update(state, chain_round(0, 0, plan=DraftPlan(max_depth=0)))  # which ends the stretch
    assert pooled_of(memory).looked == taught, "nobody learns twice from one round"


@pytest.mark.parametrize(("longest_text", "is_looked_up"), [(2, False), (32, True)])
def test_lookups_cost_the_next_round_its_program_only_if_that_reads_no_longer_text(
    longest_text: int, is_looked_up: bool
) -> None:
    """A lookup that is worth a little more than a round as one, but not more than that and going on stage by stage."""
    memory = memory_of(LONG, MEMBERS)
    assert memory.costs is not None
    memory.costs.note_whole(3, 1.1, longest_text)
    controller = Price()
    _, state = follow(controller, controller.init(memory), 6, found=True, looked=1, modelled=1)
    outlook = outlook_of(replace(state, outlook=None, stretch=None), 8)
    assert outlook.lookups is not None
    looked = outlook.lookups
    acceptance = (0.62,) * 3
    tokens = [1.0, 1.62, 1.62 + 0.62**2, 1.62 + 0.62**2 + 0.62**3]
    tied = replace(
        outlook,
        acceptance=acceptance,
        tokens=tokens,
        seconds=[1.0, 1.2, 1.4, 1.6],
        verifying=[1.0, 1.02, 1.04, 1.06],
        price=1.7,
        whole=(3, 1.1),
        lookups=replace(looked, tokens=[1.0, 1.7, 2.2, 2.4], seconds=[1.0, 1.02, 1.04, 1.06]),
    )
    assert looked.keep_from_one is not is_looked_up
    assert bool(tied.lookup_depth) is is_looked_up


def test_a_plan_of_nothing_ends_alike_rounds() -> None:
    controller, memory = Price(), memory_of(SHORT)
    decoded(controller, memory, 40)
    state = controller.init(memory)
    after = controller.update(state, chain_round(0, 0, plan=DraftPlan(max_depth=0)))
    assert after.stretch is None
    assert after.context_length == 1
