"""`price`: when it drafts, rests and comes back, alone and in a batch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from monge.bench.control_simulation import World, speed
from monge.control.base import CostModel, Memory
from monge.control.price import Price
from monge.control.price_batch import Crowd
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.control.survival import expected_tokens
from monge.core.context import DraftPlan
from monge.core.draws import TorchDraws
from monge.core.verdict import StageTimes
from tests.control.scripts import chain_round, memory_of


def draws(seed: int = 0) -> TorchDraws:
    return TorchDraws(torch.Generator().manual_seed(seed))


def test_price_rests_doubles_and_returns() -> None:
    controller, memory = Price(), memory_of(draft=0.3)
    state, plain_runs, run = controller.init(memory), [], 0
    for _ in range(700):
        plan = controller.plan(state, draws())
        run = run + 1 if plan.max_depth == 0 else 0
        if run == 1:
            plain_runs.append(0)
        if run:
            plain_runs[-1] = run
        state = controller.update(state, chain_round(min(plan.max_depth or 0, 2), 0, plan=plan))
    # A trial costs a good 0.32 plain forwards, less what its token is thought to be worth, which is less and less: so many
    # tokens later that is half a percent of the time.
    assert plain_runs[:6] == [8, 16, 25, 29, 33, 35]
    assert controller.init(memory).off_left > 0  # a new request begins where others gave up
    good = replace(state, off_left=1)
    for _ in range(30):
        plan = controller.plan(good, draws())
        window = min(plan.max_depth or 0, 4)
        good = controller.update(good, chain_round(window, window, plan=plan))
    assert good.off_left == 0
    assert good.off_tokens == 0
    assert controller.plan(good, draws()).max_depth != 0


def test_price_is_never_much_slower_than_plain_decoding() -> None:
    useless = World(regimes=(0.02,), noise=0.0, draft=0.3, node=0.1)
    for confident in (True, False):
        assert speed(Price(), useless, useless.rounds(600, draws()), draws(), confident=confident) > 0.97


def best_fixed(world: World) -> float:
    """Speed of the best fixed window, where positions do not deviate from their regime: all regimes are equally frequent."""
    costs, speeds = world.costs(), []
    for window in range(1, 13):
        tokens = sum(expected_tokens((regime,) * window)[-1] for regime in world.regimes) / len(world.regimes)
        speeds.append(tokens / costs.round_s(window))
    return max(speeds)


@pytest.mark.parametrize("acceptance", [0.5, 0.9])
def test_price_on_steady_streams(acceptance: float) -> None:
    world = World(regimes=(acceptance,), noise=0.0)
    assert speed(Price(max_window=16), world, world.rounds(800, draws()), draws()) > 0.95 * best_fixed(world)


def test_price_finds_short_stretches_that_pay() -> None:
    """Rests that only grew would sleep through them; trials are as frequent as their share of the time allows."""
    world = World(regimes=(0.02, 0.02, 0.02, 0.8), switch_prob=0.02)
    rounds = list(world.rounds(1500, draws()))
    sleepy = Price(max_window=16, probe_share=1e-6)
    assert speed(Price(max_window=16), world, rounds, draws()) > 1.1 * speed(sleepy, world, rounds, draws())


@pytest.mark.slow
def test_price_on_changing_streams() -> None:
    """The four regimes; `monge bench control` runs it for longer."""
    world = World()
    assert speed(Price(max_window=16), world, world.rounds(2000, draws()), draws()) > 1.15 * best_fixed(world)


def test_rests_are_longer_where_a_drafter_has_much_to_catch_up_with() -> None:
    def longest(catch_up_s: float) -> int:
        controller, memory = Price(), memory_of(draft=0.3)
        assert memory.costs is not None
        memory.costs.catch_up_s = catch_up_s
        state = controller.init(memory)
        for _ in range(400):
            plan = controller.plan(state, draws())
            state = controller.update(state, chain_round(min(plan.max_depth or 0, 2), 0, plan=plan))
        return state.off_tokens

    assert longest(0.64) - longest(0.0) == pytest.approx(0.64 / Price().probe_share, abs=16)


def test_a_dear_trial_is_not_repeated_soon() -> None:
    """Where a failed trial costs ten plain rounds, the rest after it is long at once: trials take a twentieth of the time."""
    controller, memory = Price(), memory_of(draft=0.3)
    assert memory.costs is not None
    memory.costs.catch_up_s = 10.0
    state, rests, run = controller.init(memory), [], 0
    for _ in range(1000):
        plan = controller.plan(state, draws())
        if plan.max_depth == 0:
            run += 1
        elif run:
            rests.append(run)
            run = 0
        state = controller.update(state, chain_round(min(plan.max_depth or 0, 2), 0, plan=plan))
    assert rests[0] >= 200
    assert len(rests) <= 3


def short_request(controller: Price, memory: Memory, accepted: int, num_tokens: int = 40) -> list[int]:
    """The windows of a request of some tokens whose rounds have so many accepted, as far as they draft."""
    state, windows, length = controller.init(memory), [], 0
    while length < num_tokens:
        plan = controller.plan(state, draws())
        window = min(4, plan.max_depth or 0)
        record = chain_round(window, min(accepted, window), plan=plan, context_length=length)
        state, length = controller.update(state, record), length + len(record.token_ids)
        windows.append(window)
    return windows


def test_short_requests_rest_together() -> None:
    """A rest that is longer than every request ends all the same, once that many tokens have been decoded."""
    controller, memory = Price(), memory_of(draft=0.3)
    while memory.notes.get("price") is None or memory.notes["price"].off_tokens < 30:
        short_request(controller, memory, 0, num_tokens=400)
    while memory.notes["price"].rested > 2:  # until a rest has just begun
        short_request(controller, memory, 0, num_tokens=2)
    resting = [short_request(controller, memory, 4, num_tokens=20) for _ in range(24)]
    assert set(resting[0]) == {0}
    assert max(resting[-1]) > 0
    assert sum(resting[-1]) > 10


def test_two_bad_rounds_do_not_outweigh_good_requests() -> None:
    controller, memory = Price(), memory_of(draft=0.5)
    for _ in range(5):
        short_request(controller, memory, 4)
    state = controller.init(memory)
    for _ in range(2):
        plan = controller.plan(state, draws())
        assert plan.max_depth != 0
        state = controller.update(state, chain_round(4, 0, plan=plan))
    assert controller.plan(state, draws()).max_depth != 0


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
    for _ in range(70):
        plans = controller.plan_many(states, [draws()] * 2)
        depths.append({plan.max_depth for plan in plans})
        rounds = [chain_round(plan.max_depth or 0, plan.max_depth or 0, plan=plan, batch_size=2) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, rounds, strict=True)]
    assert [number for number, depth in enumerate(depths) if depth == {0}] == [3, 35, 67]


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


def reading(controller: Price, memory: Memory, num_tokens: int, num_requests: int) -> list[bool]:
    """Which requests of so many tokens draft at their beginning, so that their prompts of 50 tokens are read."""
    began: list[bool] = []
    for _ in range(num_requests):
        state, length = controller.init(memory), 50
        began.append(not controller.rests(memory, 1))
        while length < 50 + num_tokens:
            plan = controller.plan(state, draws())
            window = min(2, plan.max_depth or 0)
            record = chain_round(window, window, plan=plan, context_length=length)
            state, length = controller.update(state, record), length + len(record.token_ids)
    return began


@pytest.mark.parametrize(("num_tokens", "reads"), [(20, False), (400, True)])
def test_a_prompt_is_read_where_the_request_is_long_enough_for_it(num_tokens: int, reads: bool) -> None:
    """Three tokens in 1.2 plain forwards save 0.6 of one for every token, and the prompt takes as long as twenty."""
    memory = memory_of(draft=0.08)
    assert memory.costs is not None
    memory.costs.read_s = 20.0 / 50
    began = reading(Price(), memory, num_tokens, 60)
    assert began[0], "how long requests are is not known yet"
    assert all(began) == reads
    # Rests double: what is known of acceptance may be wrong, so that some are tried, and fewer and fewer.
    assert reads or began.index(True, 1) < 40
    assert reads or 2 <= sum(began) <= 5


def test_prompts_are_read_again_once_requests_are_longer() -> None:
    controller, memory = Price(), memory_of(draft=0.08)
    assert memory.costs is not None
    memory.costs.read_s = 20.0 / 50
    assert not any(reading(controller, memory, 20, 20)[-3:])
    assert all(reading(controller, memory, 400, 20)[-3:])


@pytest.mark.parametrize(("plain", "looks"), [(1.0, 12), (0.003, 4)])
def test_short_rounds_share_a_look_at_what_they_bring(plain: float, looks: int) -> None:
    """A request that has settled looks ahead once in ten milliseconds; all it does between is drafted by the last look."""
    controller, memory = Price(), memory_of(plain=plain, node=0.0, draft=0.0)
    state, seen = controller.init(memory), list[object]()
    for number in range(20):
        plan = controller.plan(state, draws())
        record = chain_round(4, 4, plan=plan, confidences=(0.9,) * 4, levels_read=4)
        state = controller.update(state, record)
        assert state.outlook is not None
        if number >= 8 and not any(state.outlook is one for one in seen):
            seen.append(state.outlook)
            assert controller.plan(state, draws()).stop is not None
    assert len(seen) == looks
