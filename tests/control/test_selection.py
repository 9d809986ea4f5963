"""Choosing between drafters: weights, price, delayed and partial feedback, the linear model, and the law of the text."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from monge.api import make_components
from monge.control.base import SharedState
from monge.control.hedge import AdaHedge, Hedge
from monge.control.latency import Latency
from monge.control.linear_selection import FEATURES, LinearSelection, Ridge
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.prompt import PromptProfile
from monge.core.selection import CounterfactualDraft, Member
from monge.engine.decoder import Decoder
from monge.laws.draws import Draws, TapeDraws
from monge.networks.base import NodeBlock
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.control.scripts import chain_round, plan_one, updated

LOOKUP = Member(name="ngram", max_depth=4, runs_network=False)
NOTHING = Member(name="none", max_depth=0, runs_network=False)
SMALL = Member(name="small", max_depth=4, runs_network=True)
LARGE = Member(name="large", max_depth=4, runs_network=True)
SELECTORS = (
    "hedge(inner='fixed', keep=0.5, explore=0.4)",
    "linear_selection(inner='fixed', opening=1, keep=0.5, explore=0.4)",
    "linear_selection(features=('surprisal', 'entropy'), inner='fixed', opening=1)",
)


def shared_of(*members: Member, draft: float = 0.2) -> SharedState:
    return SharedState(Latency.linear(plain=1.0, node=0.1, draft=draft), members=members)


def seen(drafter: str, position: int, *factors: float, num_nodes: int = 4) -> CounterfactualDraft:
    return CounterfactualDraft(
        drafter=drafter, position=position, num_nodes=num_nodes, factors=factors
    )


def round_of(
    drafter: str, position: int, accepted: int, window: int, *found: CounterfactualDraft
) -> Any:
    plan = DraftPlan(max_depth=window, drafter=drafter)
    facts = {"context_length": position, "counterfactuals": found}
    return chain_round(window, accepted, plan=plan, drafter=drafter, **facts)


def tables(vocab: int, *seeds: int) -> list[TabularModel]:
    return [TabularModel(RandomTable(vocab, seed), vocab) for seed in seeds]


# Weights and estimates.


@pytest.mark.parametrize("pattern", ["one is best", "alternating", "the best changes"])
def test_regret_stays_below_the_bound(pattern: str) -> None:
    """Synthetic drafters with losses in [0, 1]: de Rooij et al., Theorem 8, with V <= T / 4."""
    rounds, weights, spent = 400, AdaHedge((0.0, 0.0, 0.0)), 0.0
    sums = [0.0, 0.0, 0.0]
    for number in range(rounds):
        losses = {
            "one is best": (0.5, 0.4 + 0.2 * (number % 2), 0.9),
            "alternating": (float(number % 2), float((number + 1) % 2), 0.5),
            "the best changes": (float(number >= 200), float(number < 200), 0.6),
        }[pattern]
        spent += math.fsum(
            weight * loss for weight, loss in zip(weights.weights, losses, strict=True)
        )
        sums = [total + loss for total, loss in zip(sums, losses, strict=True)]
        weights = weights.update(losses)
        assert math.isclose(sum(weights.weights), 1.0)
    bound = math.sqrt(rounds * math.log(3)) + 4 / 3 * math.log(3) + 2
    assert spent - min(sums) <= bound
    assert bound < 0.1 * rounds + 5  # the bound says something


def test_forgetting_follows_a_change() -> None:
    weights = AdaHedge((0.0, 0.0))
    for number in range(300):
        weights = weights.update((1.0, 0.0) if number < 200 else (0.0, 1.0), 0.95)
    assert weights.weights[0] > 0.9


def test_the_factor_is_unbiased_on_the_text_and_averaged_factors_are_not() -> None:
    """Length of a round of single-draft verification, against the mean of `expected_tokens` over texts of the target."""
    target, draft = TabularModel(RandomTable(3, 5), 3), TabularModel(RandomTable(3, 8), 3)
    texts = [(), *((token,) for token in range(3))]
    p, q = ({text: law_at(model, text) for text in texts} for model in (target, draft))
    overlaps = {text: sum(map(min, p[text], q[text])) for text in p}
    true = 1.0 + sum(min(p[()][x], q[()][x]) * (1.0 + overlaps[x,]) for x in range(3))
    estimated = averaged = 0.0
    for x, y in itertools.product(range(3), repeat=2):
        weight = p[()][x] * p[x,][y]
        factors = (min(1.0, q[()][x] / p[()][x]), min(1.0, q[x,][y] / p[x,][y]))
        estimated += weight * expected_tokens(factors)
        averaged += weight * expected_tokens((overlaps[()], overlaps[x,]))
    assert abs(estimated - true) < 1e-12
    assert abs(averaged - true) > 1e-3


def expected_tokens(factors: tuple[float, ...]) -> float:
    draft = CounterfactualDraft(drafter="a", position=0, num_nodes=2, factors=factors)
    return draft.expected_tokens


def law_at(model: TabularModel, text: tuple[int, ...]) -> list[float]:
    fresh = TabularModel(model.table, model.vocab_size)
    fresh.open({0: text})
    return fresh.extend({0: NodeBlock.chain((0,))})[0][0].softmax(-1).tolist()


def test_bandit_feedback_is_unbiased() -> None:
    """Over the drafter's choice and the outcome, the estimate of every drafter's gain has the true mean, not its average."""
    hedge = Hedge(inner="fixed", explore=0.3)
    state = hedge.init(shared_of(SMALL, LARGE))
    for number, (name, accepted) in enumerate([("small", 1), ("large", 3), ("small", 0)]):
        state = hedge.update(state, round_of(name, 10 + number, accepted, 4))
    price, chance = state.recent.tokens / state.recent.seconds, {"small": 0.3, "large": 0.8}

    def gains(draws: Draws) -> tuple[float, ...]:
        name = str(plan_one(hedge, state, draws).drafter)
        accepted = 4 if draws.bernoulli(chance[name]) else 1
        after = hedge.update(state, round_of(name, 50, accepted, 4))
        return tuple(
            hedge.keep * old - new
            for new, old in zip(after.weights.losses, state.weights.losses, strict=True)
        )

    law = exact_law(gains)
    for arm, name in enumerate(("small", "large")):
        true = 5.0 * chance[name] + 2.0 * (1.0 - chance[name]) - max(price, 1.0) * (1.4 + 0.8)
        assert sum(weight * outcome[arm] for outcome, weight in law.items()) == pytest.approx(
            true, abs=1e-12
        )
        average = state.drafters[name].average
        assert abs(average.tokens - max(price, 1.0) * average.seconds - true) > 0.1


# Choice.


@pytest.mark.parametrize(
    ("factors", "least", "most"),
    [((1.0,) * 4, 0.9, 1.0), ((), 0.5 - 1e-6, 0.5 + 1e-6), ((0.0,), 0.0, 0.1)],
    ids=["finds a drafter that was never used", "finding nothing costs nothing", "errors cost"],
)
def test_full_information(factors: tuple[float, ...], least: float, most: float) -> None:
    hedge = Hedge(inner="fixed", explore=0.0)
    state = hedge.init(shared_of(NOTHING, LOOKUP))
    for position in range(10, 22):
        lookup = seen("ngram", position, *factors, num_nodes=4 * bool(factors))
        found = lookup, seen("none", position, num_nodes=0)
        state = hedge.update(state, round_of("none", position, 0, 0, *found))
    assert least <= hedge.probs(state)["ngram"] <= most


@pytest.mark.parametrize(("draft", "least", "most"), [(2.0, 0.0, 0.2), (0.05, 0.8, 1.0)])
def test_a_drafter_that_accepts_more_and_takes_longer_is_left(
    draft: float, least: float, most: float
) -> None:
    hedge = Hedge(inner="fixed", explore=0.1)
    state = hedge.init(shared_of(SMALL, NOTHING, draft=draft))
    for position in range(10, 50):
        drafted = ("small", position, 2, 4) if position % 4 == 2 else ("none", position, 0, 0)
        state = hedge.update(state, round_of(*drafted, seen("none", position, num_nodes=0)))
    assert least <= hedge.probs(state)["small"] <= most


def test_late_feedback_is_settled_in_order_and_not_dropped() -> None:
    hedge = Hedge(inner="fixed", explore=0.0)
    state = hedge.init(shared_of(NOTHING, LOOKUP))
    for position in (10, 11, 12):
        state = hedge.update(state, round_of("none", position, 0, 0))
    assert [one.record.context_length for one in state.pending] == [10, 11, 12]
    assert state.weights == AdaHedge((0.0, 0.0))
    late = [
        seen(name, position, *((1.0,) if name == "ngram" else ()))
        for position in (10, 11)
        for name in ("ngram", "none")
    ]
    state = hedge.update(state, round_of("none", 13, 0, 0, *late))
    assert [one.record.context_length for one in state.pending] == [12, 13]
    assert state.weights.losses[1] < state.weights.losses[0]


def test_a_request_whose_drafter_failed_goes_on() -> None:
    hedge = Hedge(inner="fixed")
    state = hedge.init(shared_of(NOTHING, LOOKUP))
    assert hedge.update(state, chain_round(0, 0, context_length=10)) == state


# The linear model.


def test_recursive_ridge_equals_the_solution_of_the_normal_equations() -> None:
    examples = [((1.0, 0.5 * k, float(k % 3)), 0.3 * k - 1.0, 1.0 + k % 2) for k in range(12)]
    ridge = Ridge.empty(3, 2.0)
    for features, value, weight in examples:
        ridge = ridge.update(features, value, weight)
    x = torch.tensor([one[0] for one in examples], dtype=torch.float64)
    y, w = (torch.tensor([one[place] for one in examples], dtype=torch.float64) for place in (1, 2))
    matrix = 2.0 * torch.eye(3, dtype=torch.float64) + x.T @ (w[:, None] * x)
    assert ridge.coefficients == pytest.approx(torch.linalg.solve(matrix, x.T @ (w * y)).tolist())
    at = torch.tensor((1.0, 2.0, 0.0), dtype=torch.float64)
    assert ridge.width((1.0, 2.0, 0.0)) == pytest.approx(float((at @ matrix.inverse() @ at).sqrt()))


def test_features_of_prompts() -> None:
    def features(**known: Any) -> dict[str, float]:
        return {name: feature(PromptProfile(**known)) for name, feature in FEATURES.items()}

    nothing = dict.fromkeys(FEATURES, 0.0)
    assert features(token_ids=(7,)) == nothing | {"length": math.log(2) / 8}
    repeated = features(token_ids=(1, 2, 1, 2, 1, 2))
    assert repeated["repeated_pairs"] == pytest.approx(3 / 5)
    assert repeated["repeated_quadruples"] == pytest.approx(1 / 3)
    told = features(token_ids=(7,), text="x = f(10) # é", surprisal=4.0, entropy=math.inf)
    assert (told["surprisal"], told["entropy"]) == (0.5, 2.0)
    assert (told["digits"], told["code"], told["foreign"]) == pytest.approx(
        (2 / 13, 4 / 13, 1 / 13)
    )


def test_the_prompt_chooses_who_begins() -> None:
    """Lookups that worked on repetitive prompts, and failed on others, begin on repetitive prompts only."""
    shared = shared_of(LOOKUP, SMALL)
    selection = LinearSelection(inner="fixed", bonus=0.0, opening=4)
    repetitive, free = (1, 2, 3, 4) * 8, tuple(range(32))
    for number in range(60):
        prompt, works = ((repetitive, True), (free, False))[number % 2]
        state = selection.read(selection.init(shared), PromptProfile(token_ids=prompt))
        for step in range(8):
            found = seen("ngram", 40 + step, *((1.0,) * 4 if works else (0.0,)))
            name = str(plan_one(selection, state, TapeDraws([0.5, 0.5])).drafter)
            accepted = 2 if name == "small" else 4 * works
            record = round_of(name, 40 + step, accepted, 4, found)
            state = updated(selection, shared, state, record)
    begins = [
        selection.read(selection.init(shared), PromptProfile(token_ids=prompt)).choice
        for prompt in (repetitive, free)
    ]
    assert begins == ["ngram", "small"]
    state = selection.read(selection.init(shared), PromptProfile(token_ids=repetitive))
    # Certain: the opening draws nothing.
    assert plan_one(selection, state, TapeDraws([])).drafter == "ngram"
    for step in range(4):
        record = round_of("ngram", 40 + step, 0, 4, seen("ngram", 40 + step, 0.0))
        state = selection.update(state, record)
    assert state.opening_left == 0
    assert 0.0 < selection.hedge().probs(state.hedge)["small"] < 1.0


def test_a_path_of_a_tree_that_ends_above_its_deepest_node_is_no_rejection():
    """The model learns from rounds that rejected something."""
    shared = shared_of(LOOKUP, SMALL)
    selection = LinearSelection(inner="fixed", bonus=0.0, opening=4)
    learnt = []
    # All two tokens of the path were accepted; in the second case another path was deeper.
    for depth in (2, 4):
        shared.memory = None
        state = selection.read(selection.init(shared), PromptProfile(token_ids=tuple(range(32))))
        for step in range(8):
            record = replace(round_of("small", 40 + step, 2, depth), next_kind="bonus")
            state = updated(selection, shared, state, record)
        _, ridges = shared.memory
        learnt.append(ridges["small"])
    assert repr(learnt[0]) == repr(learnt[1])


# In the loop.


ALONE = Case(prompt=(0, 1, 0), horizon=3, max_new_tokens=3)
BATCH = Case(prompt=(0, 1, 0), horizon=2, max_new_tokens=2, neighbours=((1,),))


@pytest.mark.parametrize(
    ("controller", "pool", "case"),
    [
        *(
            (controller, pool, ALONE)
            for controller in SELECTORS
            for pool in ("pool('model', 'ngram')", "pool('none', 'model')")
        ),
        ("hedge(inner='goodput', keep=0.5, explore=0.4)", "pool('none', 'model')", BATCH),
    ],
)
def test_the_law_is_the_targets(controller: str, pool: str, case: Case) -> None:
    """All draws enumerated, those of the selection and of neighbours too; the drafter depends on what was accepted."""

    def components() -> Any:
        parts = {"drafter": pool, "tree": "chain(1)", "controller": controller}
        return make_components(*tables(2, 11, 23), **parts, latency=shared_of().latency)

    target = target_law(*tables(2, 11), case)
    assert law_error(output_law(components, case), target) < 1e-12


@pytest.mark.parametrize("controller", ["hedge", "linear_selection"])
def test_by_name_with_measured_choice(controller: str) -> None:
    """A draft model that equals the target and costs next to nothing takes over.

    The text stays that of plain decoding.
    """
    costs = Latency.linear(plain=1.0, node=0.01, draft=0.01)
    parts = {"drafter": "pool('none', 'ngram', 'model')", "controller": controller}
    selecting = make_components(*tables(5, 1, 1), **parts, latency=costs)
    plain = make_components(*tables(5, 1), drafter="none")
    expected, results = (
        Decoder(one).generate([(0, 1), (3,)], max_new_tokens=150, temperature=0.0, seed=2)
        for one in (plain, selecting)
    )
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert all(name is not None for one in results for name in one.stats.drafters)
    assert max(one.stats.block_efficiency for one in results) > 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hedge(explore=1.5)", "explore must lie"),
        ("hedge(keep=0)", "larger than 0"),
        ("hedge(inner='hedge')", "unknown controller 'hedge'"),
        ("hedge(inner='fsm(fist=1)')", "did you mean 'first'"),
        ("linear_selection(opening=0)", "opening must be at least 1; got 0"),
        ("linear_selection(features=('lenght',))", "did you mean 'length'"),
        ("linear_selection(features=('digits', 'digits'))", "listed twice"),
        ("linear_selection(ridge=0)", "ridge must be larger than 0; got 0"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(*tables(5, 1), drafter="pool('ngram', 'none')", controller=text)


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(OptionError, match="chooses between drafters"):
        make_components(*tables(5, 1), drafter="ngram", controller="hedge")
