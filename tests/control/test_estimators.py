"""Estimators, windows and switches: what they recover, and that they are right where they must be."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.bench.control_simulation import World, speed
from monge.control.base import CostModel, Memory
from monge.control.calibration import Calibration, sequential_temperatures, sigmoid
from monge.control.on_the_fly import OnTheFly, best_window, censored_acceptance
from monge.control.price import Price
from monge.control.q_learning import QLearning
from monge.control.survival import DepthCounts, expected_tokens
from monge.core.context import DraftPlan
from monge.core.draws import TorchDraws
from monge.core.reliability import calibration_error
from monge.core.stopping import StopRule, logit
from monge.core.verdict import StageTimes
from tests.control.scripts import chain_round, memory_of


def draws(seed: int = 0) -> TorchDraws:
    return TorchDraws(torch.Generator().manual_seed(seed))


def accepted_of(window: int, acceptance: float, source: TorchDraws) -> int:
    return next((depth for depth in range(window) if not source.bernoulli(acceptance)), window)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95, 0.98])
@pytest.mark.parametrize("largest", [1, 4, 16])
def test_the_censored_estimate_recovers_acceptance(acceptance: float, largest: int) -> None:
    """Within three standard deviations; the share accepted / drafted is another number."""
    source, rounds = draws(largest), []
    for index in range(4000):
        window = 1 + index % largest
        rounds.append((window, accepted_of(window, acceptance, source)))
    tried = sum(min(window, count + 1) for window, count in rounds)
    deviation = (acceptance * (1 - acceptance) / tried) ** 0.5
    assert abs(censored_acceptance(rounds) - acceptance) < 3 * deviation
    if largest == 16 and 0.3 <= acceptance < 0.9:
        drafted = sum(window for window, _ in rounds)
        assert sum(count for _, count in rounds) / drafted < acceptance - 0.1


def test_what_is_known_of_nothing() -> None:
    assert censored_acceptance([], (3, 1)) == 0.75
    assert censored_acceptance([(2, 2)], (0, 0), 0.98) == 0.98
    assert DepthCounts().acceptance(3) == (0.75, 0.75, 0.75)
    assert DepthCounts().acceptance(2, (0.9, 0.4)) == pytest.approx((0.9, 0.4))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.98, 1.0])
def test_the_best_window_is_the_best(acceptance: float) -> None:
    for node, draft in itertools.product((0.0, 0.02, 0.3), (0.01, 0.1, 1.0)):
        seconds = [1.0 + (node + draft) * window for window in range(17)]
        speeds = [sum(acceptance**power for power in range(window + 1)) / seconds[window] for window in range(17)]
        window = best_window(acceptance, seconds)
        assert speeds[window] == pytest.approx(max(speeds))
        if acceptance == 0.0 or max(speeds[1:]) < 1.0:
            assert window == 0
        # Costs are convex, so the first window from which another token does not raise the speed is the best one.
        marginal = next((w for w in range(16) if acceptance ** (w + 1) / (node + draft) <= speeds[w]), 16)
        assert speeds[marginal] == pytest.approx(max(speeds))


def test_on_the_fly_rests_and_probes() -> None:
    controller, memory = OnTheFly(probe_tokens=3), memory_of(draft=0.5)
    state = controller.init(memory)
    for _ in range(8):
        state = controller.update(state, chain_round(1, 0))
    planned = []
    for _ in range(5):
        plan = controller.plan(state, draws())
        planned.append(plan.max_depth)
        state = controller.update(state, chain_round(plan.max_depth or 0, 0))
    assert planned == [0, 0, 0, 1, 0]


@given(st.lists(st.integers(0, 4), max_size=30))
def test_depth_counts_are_shares_of_what_was_reached(script: list[int]) -> None:
    counts = DepthCounts()
    for accepted in script:
        counts = counts.update(chain_round(4, accepted), keep=1.0)
    for depth, (reached, accepted) in enumerate(zip(counts.reached, counts.accepted, strict=True)):
        assert reached == sum(count >= depth for count in script)
        assert accepted == sum(count > depth for count in script)


def test_depth_counts_are_unbiased_while_windows_vary() -> None:
    """Windows that depend on the past only: acceptance by depth is recovered, deep ones too."""
    truth, source, counts, window = (0.9, 0.5, 0.7), draws(), DepthCounts(), 3
    for _ in range(6000):
        accepted = next((depth for depth in range(window) if not source.bernoulli(truth[depth])), window)
        counts = counts.update(chain_round(window, accepted), keep=1.0)
        window = 1 + (accepted + window) % 3
    assert counts.acceptance(3) == pytest.approx(truth, abs=0.06)


def test_expected_tokens() -> None:
    assert expected_tokens((0.5, 0.5)) == [1.0, 1.5, 1.75]


def test_calibration_learns_what_confidence_is_worth() -> None:
    """Overconfident by a slope and a bias: the fitted law gives the true acceptance back."""
    source, calibration = draws(), Calibration()
    for index in range(1500):
        confidence = (0.3, 0.6, 0.9)[index % 3]
        truth = sigmoid(0.5 * logit(confidence) - 1.0)
        calibration = calibration.update((confidence,), int(source.bernoulli(truth)), 1)
    rule = StopRule(bias=calibration.bias, slope=calibration.slope)
    for confidence in (0.3, 0.6, 0.9):
        assert rule.acceptance(1, confidence) == pytest.approx(sigmoid(0.5 * logit(confidence) - 1.0), abs=0.07)


def test_sequential_temperatures_make_survival_honest() -> None:
    """Scores twice too sure: the error of the cumulative product falls, and no order within a depth changes."""
    source, rounds = draws(), []
    for _ in range(600):
        chances = [0.2 + 0.7 * source.uniform() for _ in range(3)]
        accepted = next((depth for depth in range(3) if not source.bernoulli(chances[depth])), 3)
        rounds.append((tuple(2.0 * logit(chance) for chance in chances), accepted))
    temperatures = sequential_temperatures(rounds)
    assert all(temperature >= 1.2 for temperature in temperatures)

    def error(scales: tuple[float, ...]) -> float:
        products = []
        for scores, _ in rounds:
            product = 1.0
            for score, scale in zip(scores, scales, strict=True):
                product *= sigmoid(score / scale)
            products.append(product)
        return calibration_error(products, [accepted == 3 for _, accepted in rounds])

    assert error(temperatures) < 0.6 * error((1.0, 1.0, 1.0))


def test_a_shared_budget_may_not_look_ahead() -> None:
    """DSpark, appendix A: whether the first token is verified must not depend on the confidence behind it.

    p = (.7, .3) and q = (.5, .5); submitting the first token only if its successor looks good moves the output to (.85, .15). A
    price that stops at the first level that does not pay decides before the token is drawn, and cannot see its successor.
    """
    p, q, steps = (0.7, 0.3), (0.5, 0.5), (1.0, 0.5, 0.45)
    overlap = sum(map(min, p, q))
    emitted = [0.0, 0.0]
    for token in range(2):
        behind = (0.9, 0.0)[token]
        values = [steps[0], (1 + overlap) * steps[1], (1 + overlap + overlap * behind) * steps[2]]
        if max(values) > values[0]:
            keeps = min(1.0, p[token] / q[token])
            emitted[token] += q[token] * keeps
            emitted[0] += q[token] * (1.0 - keeps)  # the residual is all on the first token
        else:
            for other in range(2):
                emitted[other] += q[token] * p[other]
    assert emitted == pytest.approx([0.85, 0.15])
    stop = StopRule(draw_prices=tuple((1 / after - 1 / before) * 1.0 for before, after in itertools.pairwise(steps)))
    assert not stop.draws(1, overlap)  # the same answer for either token


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
    # A trial drafts one token for a good 0.32 plain forwards: every 65 tokens that is half a percent of the time.
    assert plain_runs[:6] == [8, 16, 32, 64, 65, 65]
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


def test_q_learning_does_not_settle_on_one_token() -> None:
    memory = Memory(CostModel.linear(plain=1.0, node=0.0, draft=0.02))
    controller, source = QLearning(windows=(1, 4)), draws()
    state, chosen = controller.init(memory), []
    for _ in range(3000):
        plan = controller.plan(state, source)
        window = plan.max_depth or 0
        chosen.append(window)
        state = controller.update(state, chain_round(window, accepted_of(window, 0.8, source), plan=plan))
    assert chosen[-500:].count(4) > 400


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

    assert longest(0.64) == pytest.approx(3 * longest(0.0), abs=4)


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
    while memory.notes.get("price") is None or memory.notes["price"].off_tokens < 64:
        short_request(controller, memory, 0, num_tokens=400)
    resting = [short_request(controller, memory, 4) for _ in range(12)]
    assert set(resting[0]) == {0}
    assert max(resting[-1]) > 0
    assert sum(resting[-1]) > 20


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
        depths.append({plan.max_depth for plan in plans})
        rounds = [chain_round(plan.max_depth or 0, 0, plan=plan, batch_size=8) for plan in plans]
        states = [controller.update(state, one) for state, one in zip(states, rounds, strict=True)]
    # All together, to learn: what a trial costs is half a percent of so many plain rounds, at first two percent.
    tried = [number for number, depth in enumerate(depths) if depth != {0}]
    assert tried == [26, 112]
    assert controller.rests(memory, 8)
    assert not controller.rests(Memory(memory.costs), 8)
    memory.notes.clear()
    assert batch_of(memory, [4])[0].max_depth == 8
    memory.notes.clear()
    assert all(plan.max_depth != 0 for plan in batch_of(memory, [4] * 8))


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
