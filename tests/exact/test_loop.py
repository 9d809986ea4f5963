"""Drafter, tree, verifier and loop enumerated together.

The written text has the target's law, to the last digits.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from monge.api import make_components
from monge.core.context import DraftPlan
from monge.core.errors import MongeError
from monge.core.sampling_rules import SamplingRules
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.oracle.decoding import Case, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import Style, TabularModel
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS
from tests.engine.laws import loop_law
from tests.kit.known_bad import WithoutReplacementAsIid
from tests.kit.tables import loop_error, table
from tests.verify.programs import remembered_programs  # noqa: F401

SHAPES = {
    "chain": ("chain(1)", "chain(2)", "chain(2, 'top')", "chain(1, 'greedy_plus_one')"),
    "fixed_width": (
        "fixed_width((2,), 'iid')",
        "fixed_width((2, 1), 'iid')",
        "fixed_width((2,), 'without_replacement')",
        "fixed_width((2, 1), 'without_replacement')",
        "fixed_width((1, 2), 'without_replacement')",
        "fixed_width((2, 2), 'top')",
        "fixed_width((3,), 'greedy_plus_one')",
        "fixed_width((2, 1), 'greedy_plus_one')",
        "fixed_width((2,), 'temperatures((0.7, 1.6))')",
    ),
    "paths": ("paths(2, 1)",),
    "best_first": ("best_first(3, 2, 2, 2)", "best_first(4, 3, 2, 1)"),
    "eagle2": ("eagle2(3, 2, 2)",),
}
CASES = {
    "one token": Case(horizon=1, max_new_tokens=1),
    "two tokens": Case(horizon=2, max_new_tokens=2),
    "tree beyond the horizon": Case(horizon=1, max_new_tokens=3),
    "end of text inside a block": Case(
        horizon=2, max_new_tokens=3, eos_ids=frozenset({1}), rules=SamplingRules(top_k=2)
    ),
    "temperature": Case(horizon=2, max_new_tokens=2, rules=SamplingRules(temperature=0.6)),
    "truncated": Case(horizon=2, max_new_tokens=3, rules=SamplingRules(temperature=1.3, top_k=2)),
    "greedy": Case(horizon=3, max_new_tokens=3, rules=SamplingRules(temperature=0)),
}
LARGE_CASES = {
    "trees beyond the horizon": Case(horizon=2, max_new_tokens=4),
    "end of text after two rounds": Case(horizon=3, max_new_tokens=3, eos_ids=frozenset({1})),
    "three tokens": Case(horizon=3, max_new_tokens=3),
}
VOCAB = 3


def models(style: Style = "positive") -> list[TabularModel]:
    return [table(seed, VOCAB, style=style) for seed in (11, 23)]


def legal(tree: str, verifier: str) -> bool:
    limits = TREES.parse(tree).limits
    return why_no_exactness(VERIFIERS.make(verifier), limits.proposes, limits.max_width) is None


ENUMERABLE = [name for name in VERIFIERS if VERIFIERS.make(name).is_enumerable]
MODEL_COMBINATIONS = [
    (tree, verifier)
    for trees, verifier in product(SHAPES.values(), ENUMERABLE)
    for tree in trees
    if legal(tree, verifier)
]
# Every rule meets every case on the plain shapes. Other builders draw in the same ways: two cases
# show that they draw in time.
PLAIN_SHAPES = {tree for builder in ("chain", "fixed_width", "paths") for tree in SHAPES[builder]}
BUILDER_CASES = {"end of text inside a block", "temperature"}
SPARSE_CASES = {"two tokens", "tree beyond the horizon", "end of text inside a block"}
LOOPS = [
    (tree, verifier, case)
    for (tree, verifier), case in product(MODEL_COMBINATIONS, CASES)
    if tree in PLAIN_SHAPES or case in BUILDER_CASES
]
# By default every combination meets the first case and one of the others, each in turn; the nightly
# run has them all.
DEFAULT_CASE = "tree beyond the horizon"
OTHER_CASES = [case for case in CASES if case != DEFAULT_CASE]
DEFAULT_LOOPS = {(tree, verifier, DEFAULT_CASE) for tree, verifier in MODEL_COMBINATIONS} | {
    (tree, verifier, OTHER_CASES[number % len(OTHER_CASES)])
    for number, (tree, verifier) in enumerate(MODEL_COMBINATIONS)
}


def test_every_registered_part_is_enumerated() -> None:
    assert set(SHAPES) == set(TREES)
    # tests/heads and tests/draft
    elsewhere = {"head", "shape", "pool", "retokenize", "ensemble"}
    assert {"model", "ngram", "suffix", "none"} == set(DRAFTERS) - elsewhere
    assert {verifier for _, verifier in MODEL_COMBINATIONS} == set(ENUMERABLE)
    # See tests/verify; some with settings below.
    assert set(VERIFIERS) - set(ENUMERABLE) == {"optimal", "layer", "gumbel"}


@pytest.mark.parametrize(
    ("tree", "verifier", "case"),
    [
        pytest.param(
            *loop,
            marks=() if loop in DEFAULT_LOOPS or loop[0] not in PLAIN_SHAPES else pytest.mark.slow,
        )
        for loop in LOOPS
    ],
)
def test_every_tree_and_verifier_keeps_the_law(tree: str, verifier: str, case: str) -> None:
    style = "sparse" if case in SPARSE_CASES else "positive"
    assert error(CASES[case], style, tree=tree, verifier=verifier) < 1e-12


@pytest.mark.parametrize(
    "case", ["tree beyond the horizon", "end of text inside a block", "greedy"]
)
@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("fixed_width((2,), 'iid')", "optimal_given_candidates"),
        ("fixed_width((2,), 'iid')", "layer('optimal_given_candidates')"),
        ("chain(2)", "layer"),
        ("fixed_width((2, 1), 'iid')", "layer('k_seq')"),
        ("fixed_width((2, 1), 'greedy_plus_one')", "layer('greedy')"),
        ("fixed_width((2, 1), 'without_replacement')", "layer"),
        ("fixed_width((2, 2), 'top')", "layer"),
    ],
)
def test_rules_that_can_be_enumerated_with_other_settings(
    tree: str, verifier: str, case: str
) -> None:
    assert error(CASES[case], "sparse", tree=tree, verifier=verifier) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE_CASES.values(), ids=LARGE_CASES)
@pytest.mark.parametrize(("tree", "verifier"), MODEL_COMBINATIONS)
def test_model_drafter_over_several_rounds(tree: str, verifier: str, case: Case) -> None:
    assert error(case, tree=tree, verifier=verifier) < 1e-12


def error(case: Case, style: Style = "positive", **parts: object) -> float:
    return loop_error(partial(models, style), case, **parts)


WITHOUT_A_MODEL = [
    ("none", "sample_and_match"),
    ("suffix(num_nodes=3, depth=2)", "sample_and_match"),
    ("suffix(num_nodes=3, depth=2)", "traversal"),
    *[
        ("ngram(num_draft_tokens=2, max_ngram=2)", verifier)
        for verifier in VERIFIERS
        if verifier != "gumbel"
    ],
]


# Most rules leave what is looked up to sample and match: a case each by default, all of them in the
# nightly run.
@pytest.mark.parametrize(
    ("drafter", "verifier", "case"),
    [
        pytest.param(
            *components,
            case,
            marks=()
            if components[1] in {"sample_and_match", "layer"} or case == DEFAULT_CASE
            else pytest.mark.slow,
        )
        for components, case in product(WITHOUT_A_MODEL, CASES)
    ],
)
def test_drafters_without_a_model(drafter: str, verifier: str, case: str) -> None:
    chosen = replace(CASES[case], prompt=(0, 2, 0, 1, 0))
    parts = {"drafter": drafter, "verifier": verifier}
    assert loop_error(lambda: models("ties")[:1], chosen, **parts) < 1e-12


@pytest.mark.parametrize("verifier", ENUMERABLE)
def test_the_default_tree_of_every_verifier(verifier: str) -> None:
    """With no tree named, the library's own choice is legal, and exact."""
    assert error(Case(horizon=1, max_new_tokens=2), verifier=verifier) < 1e-12


@pytest.mark.parametrize(
    "slot", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_neighbours_in_the_batch_change_nothing(slot: int) -> None:
    case = Case(
        horizon=2, max_new_tokens=3, neighbours=((1, 2, 1), (2,)), slot=slot, eos_ids=frozenset({2})
    )
    assert error(case, tree="fixed_width((2, 1), 'iid')", verifier="recursive_rejection") < 1e-12


@pytest.mark.parametrize(
    ("limits", "adaptive"),
    [
        (DraftPlan(max_nodes=1), True),
        (DraftPlan(max_nodes=3), False),
        (DraftPlan(max_depth=1), True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        pytest.param("fixed_width((2, 1), 'iid')", "recursive_rejection", marks=pytest.mark.slow),
        pytest.param(
            "fixed_width((2, 1), 'without_replacement')",
            "recursive_rejection_without_replacement",
            marks=pytest.mark.slow,
        ),
        pytest.param("paths(2, 1)", "multipath_block", marks=pytest.mark.slow),
        ("best_first(4, 3, 2, 1)", "sample_and_match"),
        ("chain(2)", "block"),
    ],
)
def test_limits_of_a_request_keep_the_law(
    tree: str, verifier: str, limits: DraftPlan, adaptive: bool
) -> None:
    case = Case(max_new_tokens=3, limits=limits, adaptive=adaptive)
    assert error(case, tree=tree, verifier=verifier, controller="fsm") < 1e-12


def test_drafting_under_other_rules_than_the_targets() -> None:
    case = Case(horizon=2, max_new_tokens=3, rules=SamplingRules(temperature=0.7))
    rules = SamplingRules(temperature=1.8)
    assert error(case, tree="chain(2)", verifier="speculative_sampling", draft_rules=rules) < 1e-12


def test_a_repetition_penalty_sees_every_node_with_its_own_path() -> None:
    """The target's law after a node depends on the path to it, through a processor.

    The draft law does not know.
    """

    def penalise(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen = torch.bincount(token_ids[0], minlength=VOCAB)[:VOCAB]
        return scores - 0.7 * seen

    case = Case(horizon=2, max_new_tokens=3)

    def law_after(text: tuple[int, ...]) -> list[float]:
        logits = torch.tensor(models()[0].table(text), dtype=torch.float64).log().float()
        scores = penalise(torch.tensor([text]), logits[None])[0]
        return torch.softmax(scores.double(), dim=-1).tolist()

    output = loop_law(
        lambda: make_components(
            *models(), tree="fixed_width((2, 1), 'iid')", verifier="recursive_rejection"
        ),
        case.horizon,
        case.prompt,
        make_processors=lambda: (penalise,),
        seed=0,
    )
    truth = target_law(TabularModel(law_after, VOCAB), case)
    assert law_error(output, truth) < 1e-12
    plain = target_law(models()[0], case)
    assert law_error(truth, plain) > 1e-2  # the processor does something


ILLEGAL = [
    (tree, verifier)
    for trees, verifier in product(SHAPES.values(), VERIFIERS)
    for tree in trees
    if not legal(tree, verifier)
]


@pytest.mark.parametrize(("tree", "verifier"), ILLEGAL)
def test_illegal_pairs_are_refused_and_legal_ones_named(tree: str, verifier: str) -> None:
    with pytest.raises(MongeError, match="legal here: .*sample_and_match"):
        make_components(*models(), tree=tree, verifier=verifier)


def test_an_unchecked_illegal_pair_would_be_biased() -> None:
    """The refusal is needed: what it refuses changes the law."""
    case = Case(horizon=1, max_new_tokens=2)
    assert error(case, tree="fixed_width((2,))", verifier=WithoutReplacementAsIid()) > 1e-3
