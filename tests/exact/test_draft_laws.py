"""Ways of drafting beyond plain draws, in the real loop: the written text keeps the target's law."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.api import make_parts
from monge.core.context import DraftPlan
from monge.core.draws import TapeDraws, TorchDraws
from monge.core.errors import MongeError, OptionError
from monge.core.proposal import Iid, Mixed
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree
from monge.draft.tree.base import children_of
from monge.draft.tree.paths import Paths
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.known_bad import KNOWN_BAD_TREES
from monge.testing.oracle import law_error
from monge.testing.strategies import dense_law
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 4
ONE_TOKEN = Case(horizon=1, max_new_tokens=2)


def models(style: str = "positive") -> tuple[TabularModel, TabularModel]:
    target = RandomTable(VOCAB, 5, style)  # type: ignore[arg-type]
    return TabularModel(target, VOCAB), TabularModel(RandomTable(VOCAB, 17, style), VOCAB)  # type: ignore[arg-type]


def error(case: Case, style: str = "positive", **parts: object) -> float:
    output = output_law(lambda: make_parts(*models(style), **parts), case)  # type: ignore[arg-type]
    return law_error(output, target_law(models(style)[0], case))


@pytest.mark.parametrize("verifier", ["rrs", "greedy", "traversal", "target_walk"])
@pytest.mark.parametrize(
    "tree", ["fixed_width((3,), 'mixed(1)')", "fixed_width((3, 2), 'mixed')", "fixed_width((3,), 'mixed(2)')"]
)
def test_top_tokens_and_draws(tree: str, verifier: str) -> None:
    for style in ("positive", "sparse"):
        assert error(ONE_TOKEN, style, tree=tree, verifier=verifier) < 1e-12


def test_the_number_of_fixed_candidates_is_a_setting() -> None:
    q = dense_law([1, 6, 3, 2])
    for kind, width, fixed, drawn in [
        ("mixed(1)", 3, (1,), 2),
        ("mixed(num_fixed=2)", 3, (1, 2), 1),
        ("mixed", 3, (1,), 2),
        ("mixed(3)", 2, (1,), 1),  # a narrow level of a wider tree: one draw stays
        ("mixed(2)", 1, (), 1),
    ]:
        proposal = children_of(kind, q, width)
        assert isinstance(proposal, Mixed)
        assert (proposal.fixed, proposal.width) == (fixed, drawn)
        assert all(proposal.law.prob(token) == 0.0 for token in fixed)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_law_without_more_tokens_than_candidates_is_offered_whole(width: int) -> None:
    proposal = children_of("mixed(1)", dense_law([0, 2, 0, 1]), width)
    assert set(proposal.draw(TapeDraws([0.5] * width))) == {1, 3}
    assert children_of("mixed(1)", dense_law([0, 2, 0, 0]), width).draw(TapeDraws([0.5])) == (1,)


def test_one_draw_at_each_temperature() -> None:
    q = dense_law([1, 6, 0, 3])
    proposal = children_of("temperatures((1, 0.5))", q, 3)
    assert isinstance(proposal, Independent)
    plain, sharp = proposal.laws
    assert law_error(dict(enumerate(plain.at(torch.arange(4)).tolist())), dict(enumerate(q.probs.tolist()))) < 1e-15
    squares = {0: 1 / 46, 1: 36 / 46, 3: 9 / 46}
    assert law_error(dict(zip(sharp.token_ids.tolist(), sharp.probs.tolist(), strict=True)), squares) < 1e-15
    narrow = children_of("temperatures((1, 0.5))", q, 1)
    assert isinstance(narrow, Independent)
    assert len(narrow.laws) == 1
    coldest = tempered(q, 1e-4)
    assert coldest.token_ids.tolist() == [1]


def test_a_narrow_node_has_the_hub_alone() -> None:
    q = dense_law([1, 6, 3, 2])
    assert children_of("hub", q, 1).draw(TapeDraws([])) == (1,)
    assert children_of("hub", q, 3).draw(TapeDraws([0.5, 0.0])) == (1, 0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("fixed_width((3,), 'mixed(0)')", "mixed: num_fixed must be at least 1; got 0"),
        ("fixed_width((2, 1), 'mixed(2)')", r"fixed_width: children 'mixed\(2\)' .* must have 3 or more; the widest has 2"),
        ("chain(3, 'mixed')", "chain: children 'mixed' .* must have 2 or more; the widest has 1"),
        ("fixed_width((2,), 'temperatures(())')", r"temperatures: give one or more finite numbers above 0; got \(\)"),
        ("fixed_width((2,), 'temperatures((1, 0))')", r"temperatures: .* got \(1, 0\)"),
        ("fixed_width((2,), 'temperatures((1, 1.5, 2))')", "come in groups of 3 at least.* the widest has 2"),
        ("chain(2, 'hub')", "come in groups of 2 at least.* the widest has 1"),
        ("fixed_width((3,), 'mixed(fixed=1)')", "'mixed': 'fixed'; did you mean 'num_fixed'"),
        ("fixed_width((3,), 'iid(2)')", "'iid' takes at most 0 settings; got 1"),
        ("fixed_width((3,), 'mixd')", "unknown way of drawing children 'mixd'; did you mean 'mixed'"),
    ],
)
def test_bad_settings(tree: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_parts(*models(), tree=tree)


@pytest.mark.parametrize("verifier", ["rrs", "k_seq", "naive_tree", "traversal", "target_walk"])
@pytest.mark.parametrize("tree", ["paths(2, 1)", "paths(3, 1)", "paths(2, 2)"])
def test_independent_paths(tree: str, verifier: str) -> None:
    for style in ("positive", "sparse"):
        assert error(ONE_TOKEN, style, tree=tree, verifier=verifier) < 1e-12


def test_paths_longer_than_a_round_and_under_a_plan() -> None:
    case = Case(horizon=2, max_new_tokens=2)
    for controller in ("fixed", "fixed(max_nodes=3)", "fixed(max_depth=1)", "fixed(max_nodes=1)"):
        assert error(case, tree="paths(2, 2)", verifier="k_seq", controller=controller) < 1e-12


def test_a_node_draws_once_for_every_path_that_reaches_it() -> None:
    """Tokens 1, 1, 2 at the root: two paths go on below the first node, one below the second."""
    builder, tree, law = Paths(3, 2), GrowingTree(0), dense_law([2, 3, 5])
    grown = builder.expand(tree, (0,), (law,), DraftPlan(), TapeDraws([0.3, 0.3, 0.9]))
    assert [tree.multiplicity(node) for node in grown] == [2, 1]
    assert builder.expand(tree, grown, (law, law), DraftPlan(), TapeDraws([0.1, 0.9, 0.3])) == ()
    finished = builder.finish(tree, DraftPlan())
    assert [proposal.width for proposal in finished.proposals if isinstance(proposal, Iid)] == [3, 2, 1]
    assert finished.offers[:3] == ((1, 1, 2), (3, 4), (5,))
    assert finished.num_nodes - 1 <= builder.limits.max_nodes == 6


@given(seed=st.integers(0, 99), max_nodes=st.integers(1, 8), max_depth=st.integers(1, 4))
def test_paths_stay_within_the_plan(seed: int, max_nodes: int, max_depth: int) -> None:
    builder, tree, law = Paths(3, 3), GrowingTree(0), dense_law([2, 3, 5, 1])
    plan, draws = DraftPlan(max_nodes=max_nodes, max_depth=max_depth), TorchDraws(torch.Generator().manual_seed(seed))
    frontier: Sequence[int] = (0,)
    while frontier:
        frontier = builder.expand(tree, frontier, [law] * len(frontier), plan, draws)
    finished = builder.finish(tree, plan)
    assert finished.num_nodes - 1 <= max_nodes
    assert max(finished.depths) <= min(3, max_depth)


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("chain(2)", "single_draft"),
        ("fixed_width((3,), 'iid')", "k_seq"),
        ("fixed_width((2, 1))", "rrs_without_replacement"),
        ("fixed_width((3,), 'systematic')", "systematic"),
        ("fixed_width((3,), 'mixed')", "rrs"),
        ("best_first(3, 2, 2, 2)", "target_walk"),
    ],
)
def test_truncated_draft_laws(tree: str, verifier: str) -> None:
    for top_k in (1, 2, 3):
        assert error(ONE_TOKEN, tree=tree, verifier=verifier, draft_top_k=top_k) < 1e-12


def test_truncation_narrows_the_requests_own_rules() -> None:
    rules = SamplingRules(temperature=0.6, top_k=3, top_p=0.9)
    case = Case(horizon=2, max_new_tokens=2, rules=rules)
    assert error(case, tree="chain(2)", verifier="single_draft", draft_top_k=2) < 1e-12
    assert error(case, tree="chain(2)", verifier="single_draft", draft_top_k=2, draft_temperature=1.5) < 1e-12
    assert rules.within_top(2) == SamplingRules(temperature=0.6, top_k=2, top_p=0.9)
    assert rules.within_top(5) == rules
    assert SamplingRules().within_top(5) == SamplingRules(top_k=5)


@pytest.mark.parametrize("verifier", ["single_draft", "rrs"])
def test_a_truncation_that_is_not_declared_is_seen(verifier: str) -> None:
    """The same truncation, declared with the full law: the text's law is lost."""
    undeclared = KNOWN_BAD_TREES["drawn from the top two, declared with the full law"]
    assert error(ONE_TOKEN, tree="chain(1)", verifier=verifier, draft_top_k=2) < 1e-12
    assert error(ONE_TOKEN, tree=undeclared, verifier="rrs") > 1e-3


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tree": "paths(0, 2)"}, "paths: num_paths must be at least 1; got 0"),
        ({"tree": "paths(2, 0)"}, "paths: depth must be at least 1; got 0"),
        ({"draft_top_k": 0}, "draft top_k must be at least 1, or None .*; got 0"),
        ({"draft_top_k": 2, "drafter": "ngram"}, "drafter 'ngram' takes no"),
        ({"draft_top_k": 2, "drafter": "model(top_k=3)"}, "drafter 'model': top_k is given twice"),
        ({"tree": "fixed_width((2,), 'systematic(0)')"}, "exponent must be finite and above 0; got 0"),
        ({"tree": "fixed_width((2,), 'systematic(top=0)')"}, "top must be at least 1"),
        ({"tree": "fixed_width((2,), 'systematic(1.0, exponent=1.0)')"}, "exponent is given twice"),
        (
            {"tree": "fixed_width((2,), 'systematic')", "verifier": "rrs"},
            "these are drawn as Systematic; legal here: .*systematic",
        ),
    ],
)
def test_bad_parts(parts: dict[str, object], message: str) -> None:
    with pytest.raises(MongeError, match=message):
        make_parts(*models(), **parts)  # type: ignore[arg-type]
