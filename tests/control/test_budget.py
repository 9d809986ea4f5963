"""One budget for a batch.

DSpark's worked example, what anticipation would cost, and the law with neighbours.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.api import make_components
from monge.control.base import RoundInfo, SharedState
from monge.control.budget import Survivals, best_count, depths_of, first_stop, ranked
from monge.control.latency import Latency
from monge.control.survival_budget import SurvivalBudget
from monge.core.draws import Draws, TapeDraws
from monge.core.errors import OptionError
from monge.core.law import SparseLaw
from monge.core.proposal import Iid
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import exact_law, law_error
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.single_draft import SingleDraft
from tests.control.scripts import chain_round, plan_one, shared_of

SPEEDS = {1: 1.0, 2: 0.5, 3: 0.45}
"""Rounds per second of DSpark's appendix A."""
LIKELY, UNLIKELY = [[0.8, 0.8 * 0.9]], [[0.8, 0.0]]
P = SparseLaw(token_ids=torch.tensor([0, 1]), probs=torch.tensor([0.7, 0.3], dtype=torch.float64))
Q = SparseLaw(token_ids=torch.tensor([0, 1]), probs=torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_appendix_a() -> None:
    assert [
        (1 + sum(LIKELY[0][:count])) * SPEEDS[1 + count] for count in range(3)
    ] == pytest.approx([1, 0.9, 1.134])
    assert [
        (1 + sum(UNLIKELY[0][:count])) * SPEEDS[1 + count] for count in range(3)
    ] == pytest.approx([1, 0.9, 0.81])
    assert best_count(LIKELY, SPEEDS.__getitem__) == 2
    assert best_count(UNLIKELY, SPEEDS.__getitem__) == 0
    assert first_stop(LIKELY, SPEEDS.__getitem__) == first_stop(UNLIKELY, SPEEDS.__getitem__) == 0


def first_token(choose: Callable[[Survivals], int]) -> Callable[[Draws], int]:
    """One round whose second survival depends on the first drafted token, which is verified if its slot is admitted."""

    def program(draws: Draws) -> int:
        proposal = Iid(Q, 1)
        (token,) = proposal.draw(draws)
        if choose(LIKELY if token == 0 else UNLIKELY) == 0:
            return draws.categorical(P)
        return SingleDraft().emit(P, proposal, (token,), draws)

    return program


def test_unrestricted_search_on_the_present_tokens_is_biased_and_the_barriers_are_not() -> None:
    truth = {0: 0.7, 1: 0.3}
    biased = exact_law(first_token(lambda survivals: best_count(survivals, SPEEDS.__getitem__)))
    assert biased == pytest.approx({0: 0.85, 1: 0.15})
    stopped = exact_law(first_token(lambda survivals: first_stop(survivals, SPEEDS.__getitem__)))
    assert law_error(stopped, truth) < 1e-12
    for stale in (LIKELY, UNLIKELY):
        count = best_count(stale, SPEEDS.__getitem__)
        assert (
            law_error(exact_law(first_token(lambda survivals, count=count: count)), truth) < 1e-12
        )


falling = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3).map(
    lambda values: sorted(values, reverse=True)
)


@given(st.lists(falling, min_size=1, max_size=3), st.floats(0.01, 2.0), st.floats(0.0, 0.5))
def test_the_best_count_is_the_best_of_all_choices_and_the_first_stop_never_beats_it(
    survivals, plain, slot
) -> None:
    speed = lambda tokens: 1.0 / (plain + slot * tokens)  # noqa: E731
    rows = len(survivals)

    def throughput(depths) -> float:
        gained = sum(sum(values[:depth]) for values, depth in zip(survivals, depths, strict=True))
        return (rows + gained) * speed(rows + sum(depths))

    choices = product(*(range(len(values) + 1) for values in survivals))
    best = throughput(depths_of(survivals, best_count(survivals, speed)))
    assert best == pytest.approx(max(map(throughput, choices)))
    # Costs are linear here, so throughput has one peak and stopping early loses nothing.
    assert throughput(depths_of(survivals, first_stop(survivals, speed))) == pytest.approx(best)


def test_ancestors_come_first() -> None:
    assert ranked([[0.9, 0.9], [0.9, 0.1]]) == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert depths_of([[0.9, 0.2], [0.5, 0.4, 0.3]], 3) == [1, 2]


def plans(
    controller: SurvivalBudget,
    accepted: list[int],
    shared: SharedState,
    rounds: int = 12,
    batch_size: int | None = None,
) -> list[int | None]:
    """Windows of the last round; request i accepts up to `accepted[i]` tokens in every round before."""
    states = [controller.init(shared) for _ in accepted]
    windows: list[int | None] = []
    for _ in range(rounds):
        info = RoundInfo(context_lengths=(0,) * len(states), batch_size=batch_size or len(states))
        planned = controller.plan(states, info, [TapeDraws([])] * len(states))
        windows = [plan.max_depth for plan in planned]
        records = [
            chain_round(w or 0, min(count, w or 0))
            for w, count in zip(windows, accepted, strict=True)
        ]
        states = [
            controller.update(state, record) for state, record in zip(states, records, strict=True)
        ]
    return windows


@pytest.mark.parametrize("barrier", ["stale", "first_stop"])
def test_the_budget_goes_to_the_requests_that_are_followed(barrier: str) -> None:
    controller = SurvivalBudget(barrier=barrier, max_slots=6)
    good, bad = plans(controller, [8, 0], shared_of())
    assert isinstance(good, int)
    assert isinstance(bad, int)
    assert bad < good <= 6
    alone, with_rival = (
        plans(controller, [8], shared_of())[0],
        plans(controller, [8, 8], shared_of()),
    )
    assert alone == 6
    assert sum(window or 0 for window in with_rival) <= 6


def test_a_stale_budget_lags_two_rounds() -> None:
    controller, shared = SurvivalBudget(), shared_of(node=0.3, draft=0.3)
    state = controller.init(shared)
    assert len(state.survivals) == 1
    for _ in range(4):
        state = controller.update(state, chain_round(2, 0))
    assert len(state.survivals) == 3
    assert state.survivals[0][0] > state.survivals[-1][0]
    fresh, stale = state.survivals[-1], (0.99,) * 8
    swapped = type(state)(shared, (stale, fresh, fresh), state.counts)
    swapped_depth, depth = (plan_one(controller, one).max_depth or 0 for one in (swapped, state))
    assert swapped_depth > depth


def test_neighbours_that_do_not_draft_count_as_those_who_wait() -> None:
    """A slot that pays alone does not where five others write a token a round and wait for it."""
    windows: list[int | None] = []
    for batch_size in (1, 6):
        shared = shared_of(node=0.2, draft=0.2)
        windows += plans(SurvivalBudget(), [2], shared, rounds=6, batch_size=batch_size)
    assert windows == [8, 0]


def test_nothing_is_drafted_where_it_does_not_pay_but_for_probes() -> None:
    controller, shared = SurvivalBudget(probe_rounds=5), shared_of(node=1.0, draft=1.0)
    state = controller.init(shared)
    windows: list[int | None] = []
    for _ in range(30):
        plan = plan_one(controller, state, TapeDraws([]))
        windows.append(plan.max_depth)
        state = controller.update(state, chain_round(plan.max_depth or 0, 0))
    assert set(windows[2:]) == {0, 1}
    assert windows.count(1) in {4, 5, 6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"barrier": "stail"}, "did you mean 'stale'"),
        ({"max_window": 0}, "survival_budget: need"),
        ({"max_slots": 0}, "max_slots >= 1 or None; got 32, 0"),
        ({"probe_rounds": 0}, "probe_rounds >= 1"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SurvivalBudget(**settings)  # type: ignore[arg-type]


VOCAB = 3


def models() -> tuple[TabularModel, TabularModel]:
    return TabularModel(RandomTable(VOCAB, 11), VOCAB), TabularModel(RandomTable(VOCAB, 23), VOCAB)


def crowd(text: str | tuple[str, ...]) -> Callable[[], Components]:
    costs = Latency.linear(plain=1.0, node=0.05, draft=0.05)
    return lambda: make_components(
        *models(), controller=text, tree="chain(2)", costs=costs, max_batch_size=3
    )


@pytest.mark.parametrize(
    "text",
    ["survival_budget(max_slots=3)", "survival_budget('first_stop', max_slots=3)", "goodput"],
)
def test_law_with_neighbours(text: str) -> None:
    """The neighbours' rounds decide how much this request drafts, and not what it says."""
    case = Case(horizon=2, max_new_tokens=3, neighbours=((1,), (2, 0)), slot=1)
    assert law_error(output_law(crowd(text), case), target_law(models()[0], case)) < 1e-12


OFFERED = (
    "survival_budget(max_slots=3)",
    "goodput(first_cooldown=1)",
    "confidence_threshold(threshold=0.45)",
)


@pytest.mark.parametrize(
    "controllers",
    [
        pytest.param(OFFERED, marks=pytest.mark.slow),
        pytest.param((OFFERED[1], OFFERED[1], OFFERED[0]), marks=pytest.mark.slow),
        (None, OFFERED[2], OFFERED[2]),
    ],
    ids=str,
)
def test_law_beside_other_controllers(controllers: tuple[str | None, ...]) -> None:
    """Each request of a batch is planned for by the controller that it names, together with those that name the same."""
    case = Case(
        horizon=2, max_new_tokens=3, neighbours=((1,), (2, 0)), slot=1, controllers=controllers
    )
    assert law_error(output_law(crowd(OFFERED), case), target_law(models()[0], case)) < 1e-12


def test_plans_in_a_crowd_are_not_those_alone() -> None:
    def windows(prompts: list[tuple[int, ...]]) -> list[int]:
        decoder = Decoder(crowd("survival_budget(max_slots=3)")(), max_batch_size=3)
        result = decoder.generate(prompts, max_new_tokens=12, temperature=1.0, seed=0)[0]
        return [record.depth for record in result.records]

    assert windows([(0,)]) != windows([(0,), (1,), (2, 0)])
