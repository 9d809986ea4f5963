"""Closed forms against enumeration, trees against trees, and the whole measurement on a tiny pair."""

import json
import math

import numpy as np
import pytest
import torch

from monge.bench.acceptance import AcceptanceSettings, measure_acceptance, write_document
from monge.bench.acceptance_closed_forms import closed_form, inclusion
from monge.bench.acceptance_draftings import draftings, optimum
from monge.bench.acceptance_log import LogSettings, log_laws, seeded
from monge.bench.acceptance_node import accepted_masses, legal_draftings
from monge.bench.acceptance_nodes import OPTIMUM
from monge.bench.acceptance_plots import write_plots
from monge.bench.acceptance_table import table_of
from monge.bench.acceptance_tree import bound, expected_accepted, random_tree, tree_report
from monge.bench.decode import Watch
from monge.bench.expected_tokens import expected_tokens
from monge.bench.statistics import Resamples
from monge.bench.tasks import Prompt
from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.law import DenseLaw, one_hot
from monge.core.proposal import WithoutReplacement
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import ModelDrafter
from monge.draft.tree.registry import TREES
from monge.testing.oracle import exact_law
from monge.testing.tabular import RandomTable, TabularModel
from monge.transport.bounds import layer_bound
from monge.transport.candidates import CandidateLaw
from monge.transport.linear_program import solve_tree
from monge.verify.base import as_verifier
from monge.verify.registry import VERIFIERS

EXACT = 1e-12
LAWS = (
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    ([0.1, 0.0, 0.6, 0.3], [0.4, 0.3, 0.2, 0.1]),
)


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_closed_forms_are_what_the_rules_do(p, q):
    p, q = np.array(p), np.array(q)
    target = DenseLaw(torch.from_numpy(p))
    ways = draftings(q, 2)
    compared = set()
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        for way in legal_draftings(rule, ways):
            value = closed_form(name, p, way.proposal)
            if value is None or not rule.is_enumerable:
                continue
            assert sum(accepted_masses(rule, target, way.proposal).values()) == pytest.approx(value, abs=EXACT), (name, way)
            best = optimum(p, way.proposal)
            assert best is None or value <= best + EXACT, (name, way)
            compared.add(name)
    assert {"target_walk", "rrs", "rrs_without_replacement", "naive_tree", "k_seq", "greedy", "block"} <= compared


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_inclusion_of_draws_without_replacement(width):
    q = np.array([0.45, 0.3, 0.0, 0.15, 0.1])
    listed = CandidateLaw.without_replacement(q, width).inclusion
    found = inclusion(WithoutReplacement(DenseLaw(torch.from_numpy(q)), width), q.size)
    np.testing.assert_allclose(found, listed, atol=EXACT)


def small_tree(**changes):
    laws = {"target": {"": [0.5, 0.3, 0.2], "*": [0.4, 0.3, 0.3]}, "draft": {"*": [0.2, 0.3, 0.5]}}
    return table_of({"vocabulary": 3, "depth": 2, "candidates": 1, "drafting": "iid"} | laws | changes)


def test_chain_trees_agree_with_the_closed_form_of_the_paths():
    table = small_tree()
    trees = random_tree(table)
    assert bound(trees, table) == pytest.approx(layer_bound(table.target_probs, table.draft_probs, depth=2, width=1), abs=1e-9)
    report = tree_report(table)
    # One path: block verification is the multi-step optimum, and a single-draft step keeps 1 - TV a token.
    assert report["rules"]["block"] == pytest.approx(report["optimum"], abs=1e-9)
    assert report["rules"]["single_draft"] == pytest.approx(0.7 * (1 + 0.8), abs=EXACT)


def test_two_paths_node_by_node_and_tree_by_tree():
    table = small_tree(candidates=2, drafting="paths")
    by_nodes, how = expected_accepted(VERIFIERS.make("rrs_without_replacement"), table)
    assert how == "enumeration node by node"
    by_trees, how = expected_accepted(VERIFIERS.make("traversal"), table)
    assert how == "enumeration tree by tree"
    assert by_nodes is not None
    assert by_trees is not None
    trees = random_tree(table)
    best = solve_tree(trees, table.target_probs).expected_accepted
    assert by_nodes < by_trees <= best + 1e-9 <= bound(trees, table) + 2e-9


DRAFTINGS = ["paths", "iid", "without_replacement", "greedy_plus_one", "top", "systematic", "hub", "temperatures"]


class TreeLaws:
    """A table's laws as those of a network, after the one token of the prompt."""

    def __init__(self, probs):
        self._probs = probs

    def __call__(self, token_ids):
        return self._probs(token_ids[1:]).tolist()


def decoded(table, rule):
    """E[accepted tokens] of a round, by enumeration of the drafter's draws and the verifier's."""
    shape = f"paths({table.widths[0]}, {table.depth})"
    tree = TREES.parse(shape if table.drafting == "paths" else f"fixed_width({table.widths}, {table.drafting!r})")
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())

    def accepted(draws):
        drafter = ModelDrafter(model=TabularModel(TreeLaws(table.draft_probs), len(table.tokens)), tree=tree)
        (draft,) = drafter.draft([context], drafter.open([context]), [DraftPlan()], [draws])
        paths = [draft.tree.path_tokens(node) for node in range(draft.tree.num_nodes)]
        laws = [table.target_law(path) if len(path) < table.depth else one_hot(0) for path in paths]
        return as_verifier(rule).verify(draft.tree, laws, draws).num_accepted

    return math.fsum(count * prob for count, prob in exact_law(accepted).items())


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_tree_is_valued_as_the_tree_builder_draws_it_and_the_verifier_decides(drafting):
    """Every verifier; `optimal` and `layer` decide from the candidates alone, because positions have no branches."""
    table = small_tree(candidates=2 if drafting == "paths" else [2, 1], drafting=drafting)
    found = tree_report(table)["rules"]
    assert found.pop("gumbel") == found["target_walk"]
    assert {"target_walk", "layer"} | ({"multipath_block"} if drafting == "paths" else set()) <= found.keys()
    for name, value in found.items():
        rule = VERIFIERS.make(name)
        if name in {"optimal", "layer"} and drafting in {"paths", "iid", "greedy_plus_one"}:
            rule = VERIFIERS.parse({"optimal": "optimal('candidates')", "layer": "layer(\"optimal('candidates')\")"}[name])
        assert value == pytest.approx(decoded(table, rule), abs=EXACT), name


def test_multipath_block_keeps_as_much_as_any_rule_of_two_paths():
    report = tree_report(small_tree(candidates=2, drafting="paths"))
    assert report["rules"]["multipath_block"] == pytest.approx(report["optimum"], abs=1e-9)


def test_resamples_are_paired_and_cover_the_mean():
    resamples = Resamples.draw(4, seeded("test"), count=200)
    values, clusters = np.array([1.0, 2.0, 3.0, 6.0, 6.0]), np.array([0, 1, 2, 3, 3])
    found = resamples.estimate(values, clusters)
    assert found.mean == pytest.approx(3.6)
    assert 1.0 <= found.low < found.mean < found.high <= 6.0
    shifted = resamples.estimate(values + 1.0, clusters)
    assert (shifted.low, shifted.high) == (pytest.approx(found.low + 1), pytest.approx(found.high + 1))


PROMPTS = (Prompt(task="a", text="The sea was"), Prompt(task="b", text="Once upon"))
LOG = LogSettings(max_new_tokens=6, nodes_per_text=2, roots_per_text=1, draft_top_k=4)
SETTINGS = AcceptanceSettings(
    temperatures=(1.0,),
    candidates=(1, 2),
    budgets=(4,),
    path_counts=(1, 2),
    path_depths=(2,),
    samples=1,
    verifications=1,
    log=LOG,
)


@pytest.fixture(scope="module")
def document(tiny_pair):
    steps = []
    expected = []
    found = measure_acceptance(tiny_pair, PROMPTS, SETTINGS, watch=Watch(total=expected.append, step=steps.append))
    assert expected == [len(steps)]
    return found


def test_no_rule_beats_the_optimum_at_a_node(document):
    best = {(r["candidates"], r["drafting"]): r["acceptance"]["mean"] for r in document["nodes"] if r["rule"] == OPTIMUM}
    compared = 0
    for record in document["nodes"]:
        if record["how"] == "closed form":
            mean = record["acceptance"]["mean"]
            assert 0 <= mean <= best[record["candidates"], record["drafting"]] + EXACT
            compared += record["rule"] != OPTIMUM
    assert compared > 10
    assert best[2, "iid"] >= best[1, "iid"]


def test_rounds(document):
    for part in ("rounds", "paths"):
        for record in document[part]:
            assert 1 <= record["block_efficiency"]["mean"] <= record["depth"] + 1
            assert record["num_rounds"] == 2
    assert {"chain", "binary", "comb"} <= {record["family"] for record in document["rounds"]}
    assert all(record["num_nodes"] <= record["budget"] for record in document["rounds"])


def test_document_and_plots_are_written(document, tmp_path):
    path = write_document(document, tmp_path / "out")
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))
    names = [file.name for file in write_plots(document, tmp_path)]
    assert names == ["acceptance_by_candidates.png", "block_efficiency_by_nodes.png"]


def test_equal_seeds_log_equal_laws(tiny_pair):
    prompts = [(1, 2, 3)]
    first, second = (log_laws(tiny_pair, prompts, 1.0, LOG) for _ in range(2))
    assert first.roots == second.roots
    np.testing.assert_array_equal(first.nodes[0].p, second.nodes[0].p)
    assert first.nodes[0].p.sum() == pytest.approx(1.0, abs=EXACT)


def test_temperature_zero_is_refused(tiny_pair):
    with pytest.raises(OptionError, match="needs temperatures above 0"):
        log_laws(tiny_pair, [(1, 2)], 0.0, LOG)


SHAPES = {
    "draws": ("fixed_width((1, 2), 'iid')", ("rrs", "k_seq", "naive_tree", "layer(inner='rrs')", "traversal")),
    "wide": ("fixed_width((2,), 'iid')", ("k_seq", "naive_tree", "optimal(given='candidates')")),
    "distinct": ("fixed_width((1, 2), 'without_replacement')", ("rrs_without_replacement", "layer")),
    "walked": ("fixed_width((2, 1), 'top')", ("target_walk", "greedy", "layer")),
    "with one draw": ("fixed_width((2, 1), 'greedy_plus_one')", ("greedy", "rrs")),
    "chain": ("chain(2)", ("single_draft", "block", "layer")),
}


@pytest.mark.parametrize(("tree", "rules"), SHAPES.values(), ids=SHAPES)
def test_expected_tokens_have_the_mean_of_the_decisions(tree, rules):
    """Over all trees and all coins: what is expected of a tree is right on average, whatever is thrown."""
    vocab = 3
    target, draft = TabularModel(RandomTable(vocab, 5), vocab), TabularModel(RandomTable(vocab, 6), vocab)
    context = Context(request_id=0, token_ids=(0, 1), num_prompt_tokens=2, rules=SamplingRules())

    def drawn(draws):
        drafter = ModelDrafter(model=draft, tree=TREES.parse(tree))
        (state,) = drafter.open([context])
        (found,) = drafter.draft([context], [state], [DraftPlan()], [draws])
        drafter.close(context)
        paths = [(0, *found.tree.path_tokens(node)) for node in range(found.tree.num_nodes)]
        laws = [DenseLaw(torch.tensor(target.table((0, 1, *path[1:])), dtype=torch.float64)) for path in paths]
        return found.tree, laws

    def mean(law):
        return math.fsum(value * prob for value, prob in law.items())

    for name in rules:
        rule = VERIFIERS.parse(name)
        thrown = exact_law(lambda draws, rule=rule: as_verifier(rule).verify(*drawn(draws), draws).num_accepted)
        expected = exact_law(lambda draws, rule=rule: expected_tokens(rule, *drawn(draws), draws, decisions=1))
        assert mean(expected) == pytest.approx(mean(thrown), abs=1e-12)


def test_rounds_are_compared_with_rejection_and_with_one_draft(document):
    for record in document["rounds"] + document["paths"]:
        if record["rule"] in {"rrs", "rrs_without_replacement"} and record["over_rejection"]["mean"] != 1.0:
            # Where both are exact, recursive rejection with replacement is the one that is compared with.
            assert record["rule"] == "rrs_without_replacement"
        if record["tree"] == "paths(num_paths=1, depth=2)" and record["rule"] == "single_draft":
            assert record["over_one_draft"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert any(record["over_one_draft"] for record in document["paths"] if record["width"] == 2)
