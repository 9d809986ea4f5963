"""`price` where requests share rounds: one depth for all, trials of a few, and who is left alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from monge.control.base import CostModel, Memory
from monge.control.price import Price
from monge.control.price_batch import Crowd
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.control.price_resting import STRIDE
from monge.core.context import DraftPlan
from monge.core.verdict import StageTimes
from tests.control.scripts import chain_round, draws, memory_of


def batch_of(memory: Memory, accepted: list[int]) -> list[DraftPlan]:
    """Plans of a batch after ten rounds in which request i had `accepted[i]` of four tokens accepted."""
    controller = Price()
    states = [controller.init(memory) for _ in accepted]
    for _ in range(10):
        rounds = [chain_round(4, count, plan=DraftPlan(max_depth=4), batch_size=len(accepted)) for count in accepted]
        states = [controller.update(state, one) for state, one in zip(states, rounds, strict=True)]
    return controller.plan_many(states, [draws()] * len(states))


def test_one_easy_text_does_not_hold_up_a_batch() -> None:
    """A drafted level takes as long for one request as for eight: one that is sure to gain a token costs the others seven."""
    costs = {batch: {0: 1.0, 8: 2.6} for batch in (1, 8)}
    memory = Memory(CostModel(verify_s=costs, draft_s={batch: {0: 0.0, 8: 1.6} for batch in (1, 8)}, learns=False))
    assert {plan.max_depth for plan in batch_of(memory, [4] + [0] * 7)} == {0}
    controller = Price()
    states, depths = [controller.init(memory) for _ in range(8)], []
    for _ in range(190):
        plans = controller.plan_many(states, [draws()] * 8)
        depths.append([plan.max_depth for plan in plans])
        rounds = [chain_round(plan.max_depth or 0, 0, plan=plan, batch_size=8) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, rounds, strict=True)]
    # What a trial costs is half a percent of so many plain rounds, at first two percent; four requests are enough for one.
    tried = [number for number, depth in enumerate(depths) if any(depth)]
    assert tried == [22, 106]
    assert all(depths[number].count(0) == 4 for number in tried)
    assert controller.rests(memory, 8)
    assert not controller.rests(Memory(memory.costs), 8)
    memory.notes.clear()
    assert batch_of(memory, [4])[0].max_depth == 8
    memory.notes.clear()
    assert all(plan.max_depth != 0 for plan in batch_of(memory, [4] * 8))


def test_a_trial_reads_the_shortest_texts() -> None:
    controller, memory = Price(), batch_memory()
    assert memory.costs is not None
    memory.costs.batch_size = 6
    pooled_of(memory).crowd = Crowd(is_on=False, off_tokens=0)
    states = [replace(controller.init(memory), context_length=length) for length in (90, 20, 70, 10, 50, 60)]
    drafting = [plan.max_depth != 0 for plan in controller.plan_many(states, [draws()] * 6)]
    assert drafting == [False, True, False, True, True, True]
    ones = [chain_round(2, 2, plan=DraftPlan(max_depth=2), batch_size=6) for _ in range(4)]
    states = [*(controller.update(state, one) for state, one in zip(states, ones, strict=False)), *states[4:]]
    assert all(plan.max_depth != 0 for plan in controller.plan_many(states, [draws()] * 6)), "after a trial all draft, or none"


def rests_of(memory: Memory, num_rows: Sequence[int], times: StageTimes | None = None, room: Sequence[bool] = ()) -> list[int]:
    """Numbers of the rounds that draft, in a batch of so many requests where nothing is accepted; some have no room for it."""
    controller, drafting = Price(), list[int]()
    states = [controller.init(memory) for _ in range(max(num_rows))]
    for number, rows in enumerate(num_rows):
        assert memory.costs is not None
        memory.costs.batch_size = rows
        plans = controller.plan_many(states[:rows], [draws()] * rows)
        if room and not room[number]:
            plans = [plan.within(DraftPlan(max_depth=0)) for plan in plans]
        if any(plan.max_depth != 0 for plan in plans):
            drafting.append(number)
        for row, plan in enumerate(plans):
            depth = min(plan.max_depth or 0, 2)
            one = chain_round(depth, 0, plan=plan, batch_size=rows, times=(times if depth else None) or StageTimes())
            states[row] = controller.update(states[row], one)
    return drafting


def test_a_rest_is_as_long_for_few_as_for_many() -> None:
    """Between two full batches there are rounds of two requests, which are not to be tried with a fraction of the rest."""
    full = rests_of(batch_memory(), [8] * 200)
    mixed = rests_of(batch_memory(), ([8] * 6 + [2] * 2) * 25)
    assert mixed[:4] == full[:4]
    assert min(after - before for before, after in pairwise(mixed[2:])) >= min(
        after - before for before, after in pairwise(full[2:])
    )


def test_a_trial_for_which_nobody_has_room_is_made_up_for() -> None:
    usual = rests_of(batch_memory(), [8] * 60)
    room = [number != usual[1] for number in range(60)]
    assert rests_of(batch_memory(), [8] * 60, room=room)[:3] == [usual[0], usual[1] + 1, usual[2] + 1]


def test_a_trial_that_took_long_by_the_clock_makes_rests_longer() -> None:
    """The table knows what drafting costs, and not that the texts of those who draft must be read before it."""
    quick = rests_of(batch_memory(learns=True), [8] * 1500, StageTimes(total_s=3.0))
    slow = rests_of(batch_memory(learns=True), [8] * 1500, StageTimes(total_s=30.0, draft_s=27.0))
    assert len(slow) < len(quick)
    assert slow[-1] - slow[-2] > 2 * (quick[-1] - quick[-2])


def test_a_batch_that_drafts_decodes_plainly_now_and_then() -> None:
    controller, memory = Price(), memory_of(draft=0.01, node=0.0)
    states, depths = [controller.init(memory) for _ in range(2)], []
    for _ in range(520):
        plans = controller.plan_many(states, [draws()] * 2)
        depths.append({plan.max_depth for plan in plans})
        rounds = [chain_round(plan.max_depth or 0, plan.max_depth or 0, plan=plan, batch_size=2) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, rounds, strict=True)]
    run, plain = CostModel.plain_run, [number + 1 for number, depth in enumerate(depths) if depth == {0}]
    assert plain == [*range(256 - run, 256), *range(512 - run, 512)], "so many in a row that the last is warm"


def crowd(memory: Memory, *, num_rows: int, accepted: list[int], rounds: int = 10) -> DraftPlan:
    """The plan of the first of some requests that draft, in a batch of `num_rows`, after some rounds."""
    assert memory.costs is not None
    memory.costs.batch_size = num_rows
    controller = Price()
    states = [controller.init(memory) for _ in accepted]
    for _ in range(rounds):
        ones = [chain_round(4, count, plan=DraftPlan(max_depth=4), batch_size=num_rows) for count in accepted]
        states = [controller.update(state, one) for state, one in zip(states, ones, strict=True)]
    return controller.plan_many(states, [draws()] * len(states))[0]


def batch_memory(*, per_row: float = 0.1, learns: bool = False) -> Memory:
    """Rounds of one and of eight requests; a drafted level costs a fifth of a plain round, whatever the batch."""
    verify = {batch: {0: 1.0 + per_row * (batch - 1), 8: 1.8 + per_row * (batch - 1)} for batch in (1, 8)}
    return Memory(CostModel(verify_s=verify, draft_s={batch: {0: 0.0, 8: 0.8} for batch in (1, 8)}, learns=learns))


def test_one_request_that_drafts_counts_those_that_do_not() -> None:
    """Alone its four tokens a round pay; in a batch whose others write a token a round, all wait for them."""
    assert crowd(batch_memory(), num_rows=1, accepted=[4]).max_depth == 8
    assert crowd(batch_memory(), num_rows=8, accepted=[4]).max_depth == 0


def test_a_batch_is_done_when_its_slowest_request_is() -> None:
    """Seven easy texts and a hard one: what they gain is lost again while it goes on alone, unless others wait."""
    mixed = [4] * 7 + [0]
    assert crowd(batch_memory(per_row=0.01), num_rows=8, accepted=mixed).max_depth == 0
    busy = batch_memory(per_row=0.01)
    assert busy.costs is not None
    busy.costs.num_waiting = 3
    assert crowd(busy, num_rows=8, accepted=mixed).max_depth != 0
    assert crowd(batch_memory(per_row=0.01), num_rows=8, accepted=[4] * 8).max_depth != 0


def test_measured_rates_switch_a_batch_off() -> None:
    """The table promises cheap drafts; rounds that draft take three times as long as plain ones, for two tokens each."""
    memory, controller = batch_memory(learns=True), Price()
    assert memory.costs is not None
    memory.costs.batch_size = 8
    plain_s = memory.costs.verify_s(0, 8, 0)
    states, depths = [controller.init(memory) for _ in range(8)], []
    for _ in range(7):
        plans = controller.plan_many(states, [draws()] * 8)
        depths.append(plans[0].max_depth or 0)
        times = StageTimes(total_s=plain_s * (3.0 if depths[-1] else 1.0))
        ones = [chain_round(min(depths[-1], 1), min(depths[-1], 1), plan=plan, batch_size=8, times=times) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, ones, strict=True)]
    assert depths[0] > 0
    assert depths[1:] == [0] * 6


def test_prompts_that_join_a_batch_at_rest_are_left_to_its_next_trial() -> None:
    """Eight requests rest for their tokens together, and a ninth that joins them rests with them, in their trials too."""
    memory, controller = batch_memory(), Price()
    assert memory.costs is not None
    memory.costs.batch_size = 8
    states = [controller.init(memory) for _ in range(8)]
    for number in range(60):
        plans = controller.plan_many(states, [draws()] * 8)
        assert controller.rests(memory, 8) == (number > 0), "in a trial those rest who join"
        ones = [chain_round(min(plan.max_depth or 0, 2), 0, plan=plan, batch_size=8) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, ones, strict=True)]


def depths_alone(controller: Price, state: Request, rounds: int) -> list[int]:
    """What a request drafts alone where all of it is accepted."""
    depths: list[int] = []
    for _ in range(rounds):
        plan = controller.plan(state, draws())
        depths.append(plan.max_depth or 0)
        state = controller.update(state, chain_round(depths[-1], depths[-1], plan=plan))
    return depths


@pytest.mark.parametrize("rests", [True, False])
def test_who_is_alone_after_shared_rounds_that_rested_waits_for_neighbours(rests: bool) -> None:
    """It may not stay alone, and a draft model that reads its text for one round has read it for nothing."""
    memory, controller = batch_memory(), Price()
    assert memory.costs is not None
    crowd(memory, num_rows=8, accepted=[0 if rests else 4] * 8)
    assert controller.rests(memory, 8) == rests
    begins = left = controller.init(memory)
    for _ in range(6):
        left = controller.update(left, chain_round(4, 4, plan=DraftPlan(max_depth=4), batch_size=8))
    memory.costs.batch_size = 1
    assert [depth == 0 for depth in depths_alone(controller, begins, 7)] == [rests] * 4 + [False] * 3
    assert [depth == 0 for depth in depths_alone(controller, left, 7)] == [rests] * 5 + [False] * 2


def test_who_is_left_alone_rests_unless_it_pays() -> None:
    for accepted in (0, 4):
        controller, memory = Price(), batch_memory()
        assert memory.costs is not None
        memory.costs.batch_size = 8
        state = controller.init(memory)
        for _ in range(6):
            state = controller.update(state, chain_round(4, accepted, plan=DraftPlan(max_depth=4), batch_size=8))
        memory.costs.batch_size = 1
        plan = controller.plan(state, draws())
        assert (plan.max_depth == 0) == (accepted == 0)
        if not accepted:
            state = controller.update(state, chain_round(0, 0, plan=plan))
            assert state.off_left == controller.first_off


def test_what_a_resting_batch_notes_of_a_text_is_never_far_behind() -> None:
    """Plain rounds that are shared change nothing else, and every request of a batch would pay for them."""
    controller, memory = Price(), batch_memory()
    pooled_of(memory).crowd = Crowd(is_on=False, off_tokens=10_000)
    state, seen = controller.init(memory), list[Request]()
    for length in range(50, 130):
        state = controller.update(state, chain_round(0, 0, plan=DraftPlan(max_depth=0), batch_size=4, context_length=length))
        assert 0 <= length + 1 - (state.context_length or 0) < STRIDE
        if not any(state is one for one in seen):
            seen.append(state)
    assert 5 <= len(seen) <= 8
    alone = controller.update(state, chain_round(0, 0, plan=DraftPlan(max_depth=0), context_length=130))
    assert alone.context_length == 131
