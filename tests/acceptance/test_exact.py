"""Closed forms against enumeration, and trees against trees."""

import math

import numpy as np
import pytest
import torch

from lab.acceptance.expected_tokens import expected_tokens
from monge.acceptance.closed_forms import closed_form, inclusion, optimum, sampling_schemes
from monge.acceptance.inputs import table_of
from monge.acceptance.node import accepted_masses, legal_schemes
from monge.acceptance.tree import bound, expected_accepted, random_tree, tree_report
from monge.core.context import Context, DraftPlan
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
LAWS = (([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.1, 0.0, 0.6, 0.3], [0.4, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_closed_forms_are_what_the_rules_do(p, q):
    p, q = np.array(p), np.array(q)
    target = DenseLaw(torch.from_numpy(p))
    ways = sampling_schemes(q, 2)
    compared = set()
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        for way, proposal in legal_schemes(rule, ways).items():
            value = closed_form(name, p, proposal)
            if value is None or not rule.is_enumerable:
                continue
            assert sum(accepted_masses(rule, target, proposal).values()) == pytest.approx(
                value, abs=EXACT
            ), (name, way)
            best = optimum(p, proposal)
            assert best is None or value <= best + EXACT, (name, way)
            compared.add(name)
    assert {
        "target_walk",
        "rrs",
        "rrs_without_replacement",
        "naive_tree",
        "k_seq",
        "greedy",
        "block",
    } <= compared


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_inclusion_of_draws_without_replacement(width):
    q = np.array([0.45, 0.3, 0.0, 0.15, 0.1])
    listed = CandidateLaw.without_replacement(q, width).inclusion
    found = inclusion(WithoutReplacement(DenseLaw(torch.from_numpy(q)), width), q.size)
    np.testing.assert_allclose(found, listed, atol=EXACT)


def small_tree(**changes):
    laws = {"target": {"": [0.5, 0.3, 0.2], "*": [0.4, 0.3, 0.3]}, "draft": {"*": [0.2, 0.3, 0.5]}}
    return table_of(
        {"vocabulary": 3, "depth": 2, "candidates": 1, "drafting": "iid"} | laws | changes
    )


def test_chain_trees_agree_with_the_closed_form_of_the_paths():
    table = small_tree()
    trees = random_tree(table)
    assert bound(trees, table) == pytest.approx(
        layer_bound(table.target_probs, table.draft_probs, depth=2, width=1), abs=1e-9
    )
    report = tree_report(table)
    # One path: block verification is the multi-step optimum, and a single-draft step keeps 1 - TV a
    # token.
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


DRAFTINGS = [
    "paths",
    "iid",
    "without_replacement",
    "greedy_plus_one",
    "top",
    "temperatures",
]


class TreeLaws:
    """A table's laws as those of a network, after the one token of the prompt."""

    def __init__(self, probs):
        self._probs = probs

    def __call__(self, token_ids):
        return self._probs(token_ids[1:]).tolist()


def decoded(table, rule):
    """E[accepted tokens] of a round, by enumeration of the drafter's draws and the verifier's."""
    shape = f"paths({table.widths[0]}, {table.depth})"
    tree = TREES.parse(
        shape if table.drafting == "paths" else f"fixed_width({table.widths}, {table.drafting!r})"
    )
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())

    def accepted(draws):
        drafter = ModelDrafter(
            model=TabularModel(TreeLaws(table.draft_probs), len(table.tokens)), tree=tree
        )
        (draft,) = drafter.draft([context], drafter.open([context]), [DraftPlan()], [draws])
        paths = [draft.tree.path_tokens(node) for node in range(draft.tree.num_nodes)]
        laws = [table.target[path] if len(path) < table.depth else one_hot(0) for path in paths]
        return as_verifier(rule).verify(draft.tree, laws, draws).num_accepted

    return math.fsum(count * prob for count, prob in exact_law(accepted).items())


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_tree_is_valued_as_the_tree_builder_draws_it_and_the_verifier_decides(drafting):
    """Every verifier.

    `optimal` and `layer` decide from the candidates alone, because positions have no branches.
    """
    table = small_tree(candidates=2 if drafting == "paths" else [2, 1], drafting=drafting)
    found = tree_report(table)["rules"]
    assert found.pop("gumbel") == found["target_walk"]
    assert {"target_walk", "layer"} | (
        {"multipath_block"} if drafting == "paths" else set()
    ) <= found.keys()
    for name, value in found.items():
        rule = VERIFIERS.make(name)
        if name in {"optimal", "layer"} and drafting in {"paths", "iid", "greedy_plus_one"}:
            rule = VERIFIERS.parse(
                {"optimal": "optimal('candidates')", "layer": "layer(\"optimal('candidates')\")"}[
                    name
                ]
            )
        assert value == pytest.approx(decoded(table, rule), abs=EXACT), name


def test_multipath_block_keeps_as_much_as_any_rule_of_two_paths():
    report = tree_report(small_tree(candidates=2, drafting="paths"))
    assert report["rules"]["multipath_block"] == pytest.approx(report["optimum"], abs=1e-9)


SHAPES = {
    "draws": (
        "fixed_width((1, 2), 'iid')",
        ("rrs", "k_seq", "naive_tree", "layer(inner='rrs')", "traversal"),
    ),
    "wide": ("fixed_width((2,), 'iid')", ("k_seq", "naive_tree", "optimal(given='candidates')")),
    "distinct": (
        "fixed_width((1, 2), 'without_replacement')",
        ("rrs_without_replacement", "layer"),
    ),
    "walked": ("fixed_width((2, 1), 'top')", ("target_walk", "greedy", "layer")),
    "with one draw": ("fixed_width((2, 1), 'greedy_plus_one')", ("greedy", "rrs")),
    "chain": ("chain(2)", ("single_draft", "block", "layer")),
}


@pytest.mark.parametrize(("tree", "rules"), SHAPES.values(), ids=SHAPES)
def test_expected_tokens_have_the_mean_of_the_decisions(tree, rules):
    """Over all trees and all coins: what is expected of a tree is right on average, whatever is thrown."""
    vocab = 3
    target, draft = (
        TabularModel(RandomTable(vocab, 5), vocab),
        TabularModel(RandomTable(vocab, 6), vocab),
    )
    context = Context(request_id=0, token_ids=(0, 1), num_prompt_tokens=2, rules=SamplingRules())

    def drawn(draws):
        drafter = ModelDrafter(model=draft, tree=TREES.parse(tree))
        (state,) = drafter.open([context])
        (found,) = drafter.draft([context], [state], [DraftPlan()], [draws])
        drafter.close(context)
        paths = [(0, *found.tree.path_tokens(node)) for node in range(found.tree.num_nodes)]
        laws = [
            DenseLaw(torch.tensor(target.table((0, 1, *path[1:])), dtype=torch.float64))
            for path in paths
        ]
        return found.tree, laws

    def mean(law):
        return math.fsum(value * prob for value, prob in law.items())

    for name in rules:
        rule = VERIFIERS.parse(name)
        thrown = exact_law(
            lambda draws, rule=rule: as_verifier(rule).verify(*drawn(draws), draws).num_accepted
        )
        expected = exact_law(
            lambda draws, rule=rule: expected_tokens(rule, *drawn(draws), draws, decisions=1)
        )
        assert mean(expected) == pytest.approx(mean(thrown), abs=1e-12)
