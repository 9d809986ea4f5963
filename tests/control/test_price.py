"""`price`: when it drafts, rests and comes back, for a request alone."""

from dataclasses import replace

import pytest

from monge.bench.control_simulation import ARMS, MAX_FIXED, WORLDS, World, speed
from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.control.fixed import Fixed
from monge.control.price import Price
from monge.control.price_memory import pooled_of
from monge.control.price_request import Request
from monge.control.price_resting import STRIDE
from monge.control.registry import CONTROLLERS
from monge.control.survival import expected_tokens
from monge.core.context import DraftPlan
from tests.control.cost_scripts import meet, timing
from tests.control.scripts import chain_round, draws, memory_of


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
    # The second rest is 2 / 0.92 times as long, since drafting is thought to have 0.92 of the speed of plain decoding.
    # A trial costs a good 0.32 plain forwards, less what its token is thought to be worth, which is less and less: so many
    # tokens later that is half a percent of the time.
    assert plain_runs[:6] == [8, 18, 25, 29, 33, 35]
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
    sleepy, gains = Price(max_window=16, probe_share=1e-6), []
    for seed in range(3):  # single streams gain between nothing and a half
        rounds = list(world.rounds(4000, draws(seed)))
        gains.append(speed(Price(max_window=16), world, rounds, draws(seed)) / speed(sleepy, world, rounds, draws(seed)))
    assert sum(gains) / len(gains) > 1.1, gains


@pytest.mark.parametrize("name", list(WORLDS))
def test_price_on_changing_streams(name: str) -> None:
    """A fifth faster than the best fixed window, found by trying all, and no slower than any history of `on_the_fly`."""
    world = WORLDS[name]
    rounds = list(world.rounds(6000, draws(0)))
    reached = speed(Price(max_window=16), world, rounds, draws(1))
    assert reached >= 1.2 * max(speed(Fixed(max_depth=window), world, rounds, draws(1)) for window in range(MAX_FIXED + 1))
    for arm, text in ARMS.items():
        if arm.startswith("on_the_fly"):
            assert reached >= speed(CONTROLLERS.parse(text), world, rounds, draws(1)), arm


def test_rests_are_longer_where_a_drafter_has_much_to_catch_up_with() -> None:
    def longest(catch_up_s: float) -> int:
        controller, memory = Price(), memory_of(draft=0.3)
        assert memory.costs is not None
        memory.costs.catch_up_s = catch_up_s
        state = controller.init(memory)
        for _ in range(1200):
            plan = controller.plan(state, draws())
            state = controller.update(state, chain_round(min(plan.max_depth or 0, 2), 0, plan=plan))
        return state.off_tokens

    # Trials of a few rounds more lose up to as much again.
    further = (longest(0.64) - longest(0.0)) * Price().probe_share
    assert 0.56 < further < 1.28


def test_a_drafter_stays_until_it_has_lost_what_coming_back_costs() -> None:
    """A few bad rounds are no reason to pay for reading again; as many as cost the same are."""

    def rounds_of(catch_up_s: float) -> int:
        controller, memory = Price(), memory_of(draft=0.3)
        assert memory.costs is not None
        memory.costs.catch_up_s = catch_up_s
        state, count = controller.init(memory), 0
        while (plan := controller.plan(state, draws())).max_depth != 0:
            state, count = controller.update(state, chain_round(2, 0, plan=plan)), count + 1
        return count

    # A round of two levels without a token loses 0.64 plain forwards.
    assert rounds_of(0.0) < 6
    assert rounds_of(12.0) == 19


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


@pytest.mark.parametrize("rest", [1, STRIDE - 1, STRIDE, STRIDE + 1, 5 * STRIDE])
@pytest.mark.parametrize("per_round", [1, 3])
def test_a_request_that_rests_alone_keeps_its_state_for_a_while(rest: int, per_round: int) -> None:
    """It tries again when so many tokens are decoded as before, and what requests share counts every one of them."""
    controller, memory = Price(), memory_of(draft=0.3)
    state = replace(controller.init(memory), off_left=rest, off_tokens=rest)
    seen, length = list[Request](), 50
    while state.off_left:
        assert controller.plan(state, draws()).max_depth == 0
        record = chain_round(0, 0, plan=DraftPlan(max_depth=0), context_length=length, token_ids=(0,) * per_round)
        state, length = controller.update(state, record), length + per_round
        assert length - (state.context_length or 0) < STRIDE
        if not any(state is one for one in seen):
            seen.append(state)
    assert rest <= length - 50 < rest + per_round
    assert state.context_length == length
    assert state.trial_left == controller.trial
    assert pooled_of(memory).rested == length - 50
    assert pooled_of(memory).spells.tokens == length - 50
    assert len(seen) <= 2 + rest // (STRIDE - 2)


def test_short_requests_do_not_each_lose_what_coming_back_costs() -> None:
    controller, memory = Price(), memory_of(draft=0.3)
    assert memory.costs is not None
    memory.costs.catch_up_s = 12.0
    drafted = [sum(map(bool, short_request(controller, memory, 0, num_tokens=8))) for _ in range(10)]
    # Together they may lose 12 plain forwards, before the first rest.
    assert 10 < sum(drafted) < 45
    assert drafted[-1] == 0


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


def reading(controller: Price, memory: Memory, num_tokens: int, num_requests: int) -> list[bool]:
    """Which requests of so many tokens draft at their beginning, so that their prompts of 50 tokens are read."""
    began: list[bool] = []
    assert memory.costs is not None
    for _ in range(num_requests):
        memory.costs.context_length = 50  # as the loop notes
        began.append(not controller.rests(memory, 1))
        state, length = controller.init(memory), 50
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
    assert reads or 2 <= sum(began) <= 6


def test_long_prompts_are_not_read_for_what_short_ones_repay() -> None:
    """Drafting saves a usual request of forty tokens some 25 plain forwards, and reading takes one for five tokens."""
    controller, memory = Price(), memory_of(draft=0.08)
    assert memory.costs is not None
    memory.costs.read_s = 1.0 / 5
    began: dict[int, list[bool]] = {50: [], 800: []}
    for number in range(60):
        length = 800 if number % 3 == 2 else 50
        memory.costs.context_length = length
        began[length].append(not controller.rests(memory, 1))
        state, end = controller.init(memory), length + 40
        while length < end:
            plan = controller.plan(state, draws())
            window = min(2, plan.max_depth or 0)
            record = chain_round(window, window, plan=plan, context_length=length)
            state, length = controller.update(state, record), length + len(record.token_ids)
    assert all(began[50])
    assert not any(began[800][1:])


def test_prompts_are_read_again_once_requests_are_longer() -> None:
    controller, memory = Price(), memory_of(draft=0.08)
    assert memory.costs is not None
    memory.costs.read_s = 20.0 / 50
    assert not any(reading(controller, memory, 20, 20)[-3:])
    assert all(reading(controller, memory, 400, 20)[-3:])


def test_plain_rounds_say_what_plain_decoding_costs_where_nobody_knows_any_more() -> None:
    """However short requests are; those that follow a draft say nothing, so there are some in a row."""
    costs = CostModel(verify_s={1: {0: 1.0, 8: 1.1}}, draft_s={1: {0: 0.0, 8: 0.4}})
    controller, memory = Price(), Memory(costs)
    was_plain = list[bool]()
    for number in range(1100):
        if number % 20 == 0:
            state = controller.init(memory)
        plan, wanted = controller.plan(state, draws()), costs.wants_plain
        was_plain.append(plan.max_depth == 0)
        assert was_plain[-1] == wanted
        window = plan.max_depth or 0
        record = chain_round(window, min(4, window), plan=plan, context_length=10 + 5 * (number % 20))
        rest_s = 2.0 if record.num_nodes else 1.0
        meet(costs, timing(record.num_nodes, rest_s, depth=record.depth, draft_s=0.05 * record.depth))
        state = controller.update(state, record)
    run = costs.plain_run
    plain = [number for number, is_plain in enumerate(was_plain) if is_plain]
    assert plain == [*range(512, 512 + run), *range(1024 + run, 1024 + 2 * run)]


def test_a_request_begins_as_was_said_of_it() -> None:
    """Whether its prompt is read is asked first; what has been learnt since then counts, and nobody else gets its state."""
    controller, memory = Price(), memory_of(draft=0.08)
    pooled = pooled_of(memory)
    assert not controller.rests(memory, 1)
    assert pooled.begun is not None
    kept = pooled.begun[1]
    assert controller.init(memory) is kept
    assert controller.init(memory) is not kept
    assert not controller.rests(memory, 1)
    kept = pooled.begun[1]
    pooled.switch_off(500)
    assert controller.init(memory) is not kept
