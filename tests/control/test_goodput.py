"""The default controller: depth, model-free drafters, cooldown and probes, batches."""

from collections.abc import Callable
from typing import Any

import pytest

from lab.control.simulation import WORLDS, World, chain_record, speed
from monge.control.base import RoundInfo, SharedState
from monge.control.fixed import Fixed
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.context import DraftPlan
from monge.core.selection import Member
from monge.core.verdict import StageTimes
from monge.laws.draws import TapeDraws
from tests.control.scripts import (
    chain_round,
    draws,
    latency_of_rounds,
    plan_one,
    shared_of,
    updated,
)

POOL = (
    Member(name="ngram", max_depth=8, runs_network=False),
    Member(name="model", max_depth=8, runs_network=True),
)


def decode(
    controller: Goodput, shared: SharedState, accepted: int, rounds: int, **fields: Any
) -> list[int]:
    """Depths of rounds of which up to `accepted` tokens are accepted."""
    state, depths = controller.init(shared), list[int]()
    for _ in range(rounds):
        plan = plan_one(controller, state, memory=shared.memory)
        window = plan.max_depth or 0
        depths.append(window)
        record = chain_round(window, min(accepted, window), plan=plan, **fields)
        state = updated(controller, shared, state, record)
    return depths


def test_a_good_cheap_draft_is_used_to_its_full_depth() -> None:
    depths = decode(Goodput(), shared_of(node=0.01, draft=0.02), 8, 20)
    assert depths[:2] == [0, 0], "the first rounds tell what plain decoding takes"
    assert depths[-1] == 8
    assert 0 not in depths[2:]


def test_a_small_lead_is_checked_against_new_plain_rounds_and_a_large_one_is_not() -> None:
    small = decode(Goodput(max_window=1), shared_of(node=0.1, draft=0.5), 1, 200)
    large = decode(Goodput(max_window=1), shared_of(node=0.1, draft=0.1), 1, 200)
    plain = [place for place, depth in enumerate(small) if not depth]
    assert plain == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert large.count(0) == 2


@pytest.mark.parametrize(("seconds", "pause"), [(1.1, (32, 99)), (3.0, (100, 300))])
def test_a_cooldown_lasts_until_its_probe_is_four_percent_of_it(
    seconds: float, pause: tuple[int, int]
) -> None:
    """The first drafts after a pause take long where a network reads the text first."""
    controller, shared = Goodput(max_window=1), SharedState(Latency())
    state, depths = controller.init(shared), list[int]()
    for _ in range(500):
        depth = plan_one(controller, state, memory=shared.memory).max_depth or 0
        spent = seconds if depth else 1.0
        shared.latency.observe(spent, depth=depth)
        times = StageTimes(total_s=spent, forward_s=0.0, is_warm_up=False)
        record = chain_round(depth, 0, plan=DraftPlan(max_depth=depth), times=times)
        state = updated(controller, shared, state, record)
        depths.append(depth)
    drafted = [place for place, depth in enumerate(depths) if depth]
    gaps = [after - before for before, after in zip(drafted, drafted[1:], strict=False)]
    assert pause[0] <= next(gap for gap in gaps if gap > 8) <= pause[1]


def test_first_plain_rounds_that_are_slow_are_corrected() -> None:
    controller, shared = Goodput(max_window=1), shared_of()
    shared.latency = Latency()
    state, depths = controller.init(shared), list[int]()
    for number in range(64):
        depth = plan_one(controller, state, memory=shared.memory).max_depth or 0
        # A drafted round takes 1.6 times a plain one, and half of the drafts are accepted.
        seconds = 1.6 if depth else 1.2 if number < 2 else 1.0
        shared.latency.observe(seconds, depth=depth)
        state = updated(controller, shared, state, chain_round(depth, number % 2 and depth))
        depths.append(depth)
    assert sum(depths[40:]) <= 12


def test_a_draft_that_is_never_accepted_pauses_for_longer_and_longer() -> None:
    controller = Goodput(first_cooldown=4, last_cooldown=64)
    depths = decode(controller, shared_of(node=0.1, draft=0.2), 0, 400)
    starts = [place for place in range(1, 400) if depths[place] and not depths[place - 1]]
    gaps = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    assert max(gaps[:2]) < 8
    assert min(gaps[-3:]) >= 64
    assert sum(depth > 0 for depth in depths[50:]) < 0.1 * 350


def test_probes_take_a_small_share_of_the_time() -> None:
    """However large the longest cooldown is: what a probe loses bounds it."""
    plain, slow = 1.0, shared_of(node=0.02, draft=0.05)
    depths = decode(Goodput(last_cooldown=100_000), slow, 0, 6000)
    lost = sum(0.07 * depth for depth in depths[1000:]) / (5000 * plain)
    assert lost < 0.02
    assert any(depths[3000:]), "it goes on looking"


def test_a_draft_that_becomes_good_is_found_again() -> None:
    controller, shared = Goodput(), shared_of(node=0.02, draft=0.05)
    decode(controller, shared, 0, 200)
    depths = decode(controller, shared, 8, 300)
    assert depths[-50:].count(0) == 0


def test_a_draft_that_pays_recovers_from_bad_luck() -> None:
    """It is worth 1.16 times plain decoding; its first rounds are as bad as one run in twenty."""
    seconds = (1.0, 1.41, 1.52, 1.59, 1.70, 1.87)
    latency = latency_of_rounds(*((depth, 1, spent) for depth, spent in enumerate(seconds)))
    rounds = draws(0)
    lucky = [next(n for n in range(9) if n == 8 or rounds.uniform() > 0.5) for _ in range(900)]
    controller, shared = Goodput(max_window=5), SharedState(latency)
    state = controller.init(shared)
    plans = []
    for accepted in [1, 0, 0, 0] * 12 + lucky:
        window = plan_one(controller, state, memory=shared.memory).max_depth or 0
        plans.append(window)
        state = updated(controller, shared, state, chain_round(window, min(accepted, window)))
    assert sum(window > 0 for window in plans[300:]) > 0.8 * len(plans[300:])


@pytest.mark.parametrize("every", [0, 50])
def test_a_slow_machine_does_not_silence_a_draft_that_pays(every: int) -> None:
    """Now and then the machine does something else, and bad luck comes after good."""
    latency, rounds = Latency(), draws(0)
    controller, shared = Goodput(max_window=1), SharedState(latency)
    state, depths = controller.init(shared), list[int]()
    for number in range(600):
        depth = plan_one(controller, state, memory=shared.memory).max_depth or 0
        usual = 1.0 + 0.25 * depth + 0.1 * rounds.uniform()
        spent = 20.0 if every and number % every == 20 else usual
        latency.observe(spent, depth=depth)
        times = StageTimes(total_s=spent, forward_s=0.0, is_warm_up=False)
        is_lucky = not 200 <= number < 230 and rounds.uniform() < 0.55
        record = chain_round(depth, depth if is_lucky else 0, times=times)
        state = updated(controller, shared, state, record)
        depths.append(depth)
    assert sum(depths[:200]) > 160
    assert sum(depths[300:]) > 240


def test_a_new_request_begins_with_what_others_taught() -> None:
    controller, shared = Goodput(), shared_of(node=0.1, draft=0.3)
    decode(controller, shared, 0, 100)
    state = controller.init(shared)
    assert plan_one(controller, state, memory=shared.memory).max_depth == 0
    assert not controller.prefills_drafter_eagerly(shared)
    assert controller.prefills_drafter_eagerly(shared_of())


@pytest.mark.parametrize(
    ("acceptance", "draft"), [(0.7, 0.1), (0.85, 0.06), (0.6, 0.2), (0.5, 0.05)]
)
def test_it_settles_where_seconds_are_yet_to_be_learned(acceptance: float, draft: float) -> None:
    """Against the best fixed depth, over 300 rounds with times that vary, the first ones of their kind slow."""
    world = World(regimes=(acceptance,), switch_prob=0.0, draft=draft, node=0.03)
    ratios: list[float] = []
    for seed in range(4):
        rounds = list(world.rounds(300, draws(seed)))
        best = max(speed(Fixed(max_depth=depth), world, rounds, draws()) for depth in range(9))
        noise, costs, latency = draws(seed), world.costs(), Latency()
        controller, shared = Goodput(), SharedState(latency)
        state, tokens, seconds, known = controller.init(shared), 0, 0.0, set[int]()
        for one in rounds:
            record = chain_record(plan_one(controller, state, memory=shared.memory), one, 0)
            spent = costs.round_s(record.depth) * (1.0 + 0.1 * noise.uniform())
            slow = 1.0 if record.depth in known else 1.5
            known.add(record.depth)
            latency.observe(slow * spent, depth=record.depth)
            state = updated(controller, shared, state, record)
            tokens, seconds = tokens + len(record.token_ids), seconds + spent / 1.05
        ratios.append(tokens / seconds / best)
    assert sum(ratios) / len(ratios) > 0.97


def pooled(node: float, draft: float) -> SharedState:
    return SharedState(Latency.linear(plain=1.0, node=node, draft=draft), members=POOL)


def test_model_free_drafts_go_first_where_they_are_worth_more() -> None:
    controller, shared = Goodput(), pooled(0.02, 0.5)
    decode(controller, shared, 6, 30, drafter="ngram")
    plan = plan_one(controller, controller.init(shared), memory=shared.memory)
    assert plan.model_free_depth == 8


def test_model_free_drafts_that_fail_are_asked_rarely() -> None:
    """Eight further nodes cost half a round here, and are never accepted."""
    controller, shared = Goodput(), pooled(0.06, 0.01)
    state = controller.init(shared)
    asked = []
    for _ in range(200):
        plan = plan_one(controller, state, memory=shared.memory)
        asked.append(bool(plan.model_free_depth))
        name = "ngram" if asked[-1] else "model"
        window = min(plan.model_free_depth or plan.max_depth or 0, 8)
        record = chain_round(window, 0 if asked[-1] else window, plan=plan, drafter=name)
        state = updated(controller, shared, state, record)
    assert sum(asked[100:]) <= 10
    assert any(asked[100:])


def test_model_free_drafts_go_on_while_the_network_pauses() -> None:
    controller, shared = Goodput(), pooled(0.01, 1.0)
    decode(controller, shared, 4, 30, drafter="ngram")
    decode(controller, shared, 0, 24, drafter="model")
    plan = plan_one(controller, controller.init(shared), memory=shared.memory)
    assert plan.max_depth == 0
    assert plan.model_free_depth


def test_without_a_pool_no_lookups_are_planned() -> None:
    assert plan_one(Goodput(), Goodput().init(shared_of())).model_free_depth is None


def in_batch(
    shared: SharedState,
    outcome: Callable[[int, int, int], tuple[int, int]],
    *,
    count: int = 16,
    batch_size: int = 16,
    recorded_size: int | None = None,
    rounds: int = 200,
) -> list[int]:
    """Depths of rounds of `count` requests; all of a round share one.

    `outcome` says how many tokens a request drafts and gets accepted, by the number of the round,
    the request, and the planned depth.
    """
    controller = Goodput()
    states, depths = [controller.init(shared) for _ in range(count)], list[int]()
    for number in range(rounds):
        lengths = (20,) * count
        info = RoundInfo(context_lengths=lengths, batch_size=batch_size, memory=shared.memory)
        plans = controller.plan(states, info, [TapeDraws([])] * count)
        assert len({plan.max_depth for plan in plans}) == 1
        depths.append(plans[0].max_depth or 0)
        size = recorded_size or batch_size
        records = [
            chain_round(*outcome(number, place, depths[-1]), plan=plan, batch_size=size)
            for place, plan in enumerate(plans)
        ]
        states = [
            updated(controller, shared, state, record)
            for state, record in zip(states, records, strict=True)
        ]
    return depths


@pytest.mark.parametrize(("batch_size", "drafts"), [(2, True), (16, False)])
def test_a_batch_shares_one_decision(batch_size: int, drafts: bool) -> None:
    """Two requests that accept everything.

    Alone their drafts pay, in a batch of sixteen that wait for them they do not.
    """
    latency = latency_of_rounds((0, 1, 1.0), (8, 1, 1.6), (0, 16, 1.5), (8, 16, 8.0))
    depths = in_batch(
        SharedState(latency),
        lambda _, __, depth: (depth, depth),
        count=2,
        rounds=100,
        batch_size=batch_size,
    )
    assert (depths[-1] > 0) == drafts


@pytest.mark.parametrize(
    ("world", "least"), [("light load", 1.08), ("verification ten times dearer", 1.03)]
)
def test_in_simulated_worlds_it_beats_the_best_fixed_window(world: str, least: float) -> None:
    """Whose acceptance changes every ten rounds on average; the window is chosen in hindsight."""
    rounds = list(WORLDS[world].rounds(1500, draws(0)))
    best = max(
        speed(Fixed(max_depth=window), WORLDS[world], rounds, draws(1)) for window in range(1, 9)
    )
    assert speed(Goodput(max_window=16), WORLDS[world], rounds, draws(1)) > least * best


def test_a_useless_draft_costs_three_percent_at_most() -> None:
    world = WORLDS["useless draft three quarters of the time"]
    rounds = [one for one in world.rounds(4000, draws(0)) if one.acceptance[0] < 0.5]
    assert speed(Goodput(max_window=16), world, rounds, draws(1)) > 0.97


@pytest.mark.parametrize(("node", "pays"), [(0.1, False), (0.02, True)])
def test_a_batch_waits_for_drafts_that_few_requests_have_only_where_they_pay(
    node: float, pays: bool
) -> None:
    """Matches are good, but only one request of sixteen has one."""
    depths = in_batch(
        shared_of(node=node, draft=0.0),
        lambda _, place, depth: (depth, depth) if place == 0 else (0, 0),
    )
    share = sum(depth > 0 for depth in depths[20:]) / 180
    assert share > 0.8 if pays else share < 0.2


def test_a_batch_counts_gains_of_the_requests_that_draft() -> None:
    """One request always has a good match; the others seldom have one, and it is wrong."""

    def outcome(number: int, place: int, depth: int) -> tuple[int, int]:
        has_match = place == 0 or (number + place) % 16 == 0
        return (depth if has_match else 0), (depth if place == 0 else 0)

    depths = in_batch(shared_of(node=0.02, draft=0.0), outcome)
    assert sum(depth > 0 for depth in depths[100:]) > 80


@pytest.mark.parametrize(("seconds", "drafts"), [(1.45, False), (1.3, True)])
def test_a_batch_must_gain_more_than_its_last_request_loses(seconds: float, drafts: bool) -> None:
    """Half of the drafts are accepted, so a batch gains 3 or 15 %."""
    latency = latency_of_rounds((0, 16, 1.0), (1, 16, seconds))
    depths = in_batch(
        SharedState(latency, max_depth=1),
        lambda number, place, depth: (depth, (number + place) % 2 * depth),
    )
    assert (sum(depths[100:]) > 80) == drafts
    if not drafts:
        assert sum(depths[100:]) < 20
