"""Trees of tabular laws: valued as they are drawn and decided, and files that must be refused."""

import json
import math

import pytest
import torch

from lab.acceptance.expected_tokens import expected_tokens
from lab.acceptance.tree_tables import table_of
from lab.acceptance.tree_values import bound, expected_accepted, random_tree, tree_report
from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import Model
from monge.draft.tree.registry import TREES
from monge.laws.law import DenseLaw, one_hot
from monge.oracle.exact_law import exact_law
from monge.oracle.tabular import RandomTable, TabularModel
from monge.transport.bounds import layer_bound
from monge.transport.linear_program import solve_tree
from monge.verify.base import as_verifier
from monge.verify.registry import VERIFIERS

EXACT = 1e-12

TREE = """{
"vocabulary": ["a", "b", "c"],
"depth": 2,
"candidates": [2, 1],
"drafting": "iid",
"target": {"": [0.5, 0.3, 0.2], "a": [0.6, 0.2, 0.2], "*": [0.4, 0.3, 0.3]},
"draft": {"*": [0.2, 0.3, 0.5]}
}"""

LARGE = {"vocabulary": 5, "depth": 3, "candidates": 3, "drafting": "iid"}
LARGE |= {key: {"*": [0.2] * 5} for key in ("target", "draft")}


def small_tree(**changes):
    laws = {"target": {"": [0.5, 0.3, 0.2], "*": [0.4, 0.3, 0.3]}, "draft": {"*": [0.2, 0.3, 0.5]}}
    shape = {"vocabulary": 3, "depth": 2, "candidates": 1, "drafting": "iid"}
    return table_of(shape | laws | changes)


def test_chain_trees_agree_with_the_closed_form_of_the_paths():
    table = small_tree()
    trees = random_tree(table)
    largest = layer_bound(table.target_probs, table.draft_probs, depth=2, width=1)
    assert bound(trees, table) == pytest.approx(largest, abs=1e-9)
    report = tree_report(table)
    # One path: block verification is the multi-step optimum, and a single-draft step keeps 1 - TV a
    # token.
    assert report["rules"]["block"] == pytest.approx(report["optimum"], abs=1e-9)
    assert report["rules"]["speculative_sampling"] == pytest.approx(0.7 * (1 + 0.8), abs=EXACT)


def test_two_paths_node_by_node_and_tree_by_tree():
    table = small_tree(candidates=2, drafting="paths")
    by_nodes, how = expected_accepted(
        VERIFIERS.make("recursive_rejection_without_replacement"), table
    )
    assert how == "enumeration node by node"
    by_trees, how = expected_accepted(VERIFIERS.make("traversal"), table)
    assert how == "enumeration tree by tree"
    assert by_nodes is not None
    assert by_trees is not None
    trees = random_tree(table)
    best = solve_tree(trees, table.target_probs).expected_accepted
    assert by_nodes < by_trees <= best + 1e-9 <= bound(trees, table) + 2e-9


DRAFTINGS = ["paths", "iid", "without_replacement", "greedy_plus_one", "top", "temperatures"]


class TreeLaws:
    """A table's laws as those of a network, after the one token of the prompt."""

    def __init__(self, probs):
        self._probs = probs

    def __call__(self, token_ids):
        return self._probs(token_ids[1:]).tolist()


def decoded(table, rule):
    """E[accepted tokens] of a round, by enumeration of the drafter's draws and the verifier's."""
    shape = f"fixed_width({table.widths}, {table.drafting!r})"
    if table.drafting == "paths":
        shape = f"paths({table.widths[0]}, {table.depth})"
    tree = TREES.parse(shape)
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())

    def accepted(draws):
        drafter = Model(
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
    assert found.pop("gumbel") == found["sample_and_match"]
    assert {"sample_and_match", "layer"} <= found.keys()
    assert drafting != "paths" or "multipath_block" in found
    given = {"optimal": "optimal_given_candidates", "layer": "layer('optimal_given_candidates')"}
    if drafting not in {"paths", "iid", "greedy_plus_one"}:
        given = {}
    for name, value in found.items():
        rule = VERIFIERS.parse(given.get(name, name))
        assert value == pytest.approx(decoded(table, rule), abs=EXACT), name


def test_multipath_block_keeps_as_much_as_any_rule_of_two_paths():
    report = tree_report(small_tree(candidates=2, drafting="paths"))
    assert report["rules"]["multipath_block"] == pytest.approx(report["optimum"], abs=1e-9)


DISTINCT, LAYERS = (
    "fixed_width((1, 2), 'without_replacement')",
    ("layer(inner='recursive_rejection')", "traversal"),
)
SHAPES = {
    "draws": (
        "fixed_width((1, 2), 'iid')",
        ("recursive_rejection", "k_seq", "naive_tree", *LAYERS),
    ),
    "wide": ("fixed_width((2,), 'iid')", ("k_seq", "naive_tree", "optimal_given_candidates")),
    "distinct": (DISTINCT, ("recursive_rejection_without_replacement", "layer")),
    "walked": ("fixed_width((2, 1), 'top')", ("sample_and_match", "greedy", "layer")),
    "with one draw": ("fixed_width((2, 1), 'greedy_plus_one')", ("greedy", "recursive_rejection")),
    "chain": ("chain(2)", ("speculative_sampling", "block", "layer")),
}


@pytest.mark.parametrize(("tree", "rules"), SHAPES.values(), ids=SHAPES)
def test_expected_tokens_have_the_mean_of_the_decisions(tree, rules):
    """Over all trees and all coins: what is expected of a tree is right on average, whatever is thrown."""
    vocab = 3
    target, draft = (TabularModel(RandomTable(vocab, seed), vocab) for seed in (5, 6))
    context = Context(request_id=0, token_ids=(0, 1), num_prompt_tokens=2, rules=SamplingRules())

    def drawn(draws):
        drafter = Model(model=draft, tree=TREES.parse(tree))
        (state,) = drafter.open([context])
        (found,) = drafter.draft([context], [state], [DraftPlan()], [draws])
        drafter.close(context)
        paths = [found.tree.path_tokens(node) for node in range(found.tree.num_nodes)]
        masses = torch.tensor([target.table((0, 1, *path)) for path in paths], dtype=torch.float64)
        return found.tree, list(map(DenseLaw, masses))

    def mean(law):
        return math.fsum(value * prob for value, prob in law.items())

    for name in rules:
        rule = VERIFIERS.parse(name)

        def thrown(draws, rule=as_verifier(rule)):  # noqa: B008 (this one)
            return rule.verify(*drawn(draws), draws).num_accepted

        def expected(draws, rule=rule):
            return expected_tokens(rule, *drawn(draws), draws, decisions=1)

        means = [mean(exact_law(run)) for run in (expected, thrown)]
        assert means[0] == pytest.approx(means[1], abs=1e-12)


def test_tree_file(lab, tmp_path):
    (tmp_path / "tree.json").write_text(TREE)
    found = json.loads(lab("acceptance.trees", tmp_path / "tree.json", "--json").stdout)
    rules, best = found["rules"], found["optimum"]
    # The root accepts 0.76 with recursive rejection; then one draft is kept with 1 - TV = 0.7 (0.6
    # after token a).
    assert 0.76 * 1.6 < rules["recursive_rejection"] < 0.76 * 1.8
    assert rules["optimal"] > rules["recursive_rejection"]
    assert found["layer_bound"] >= best - 1e-9
    assert all(value <= best + 1e-9 for value in rules.values() if value is not None)
    result = lab("acceptance.trees", tmp_path / "tree.json")
    assert result.exit_code == 0
    assert "below the optimum" in result.stdout
    assert "layer bound" in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"depth": 2', '"depth": 2, "deph": 2', "tree file: 'deph'; did you mean 'depth'?"),
        ('"depth": 2,', "", "tree: expected an object with the keys vocabulary, depth"),
        ('"depth": 2', '"depth": 0', "tree: depth must lie in 1..6; got 0"),
        ("[2, 1]", "[2]", "tree: candidates must be one number, or without 'paths' one for each"),
        ("[2, 1]", "[2, 1.5]", "tree: candidates must lie in 1..32; got 1.5"),
        ('"b", "c"]', '"b", "a"]', "tree: vocabulary must be a number of tokens"),
        ('"b", "c"]', '"b", "x y"]', "or a list of different names, without blanks"),
        ('"iid"', '"idd"', "unknown way of drawing children 'idd'; did you mean 'iid'?"),
        ('"a": [0.6', '"d": [0.6', "target has the prefix 'd', but 'd' is no token"),
        ("[0.6, 0.2, 0.2]", "[0.6, 0.2, 0.3]", "after 'a': masses must be non-negative and sum to"),
        ("[0.6, 0.2, 0.2]", "[0.6, 0.4]", "tree: target after 'a' has 2 entries for 3 tokens"),
        (', "*": [0.4, 0.3, 0.3]', "", "target: no law after 'b'; list it, or give one under '*'"),
        ('[2, 1],\n"drafting": "iid"', '[2, 3],\n"drafting": "paths"', "must be one number"),
        (TREE, '"just text"', "tree: expected an object with the keys"),
        (TREE, '{"a": [1', "as JSON"),
        (TREE, json.dumps(LARGE), "take a smaller vocabulary, depth or width"),
    ],
)
def test_bad_tree_files(lab, tmp_path, old, new, message):
    (tmp_path / "tree.json").write_text(TREE.replace(old, new))
    result = lab("acceptance.trees", tmp_path / "tree.json")
    assert result.exit_code == 2
    assert message in result.stderr
