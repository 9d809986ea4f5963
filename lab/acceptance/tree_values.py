"""Expected accepted tokens of every verifier on a small tree of tabular laws, by enumeration, and upper bounds.

p = target law, q = draft law, tau = accepted draft tokens of a round.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from lab.acceptance.given_candidates import OptimalGivenCandidates
from lab.acceptance.tree_tables import PATHS, TreeTable
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.laws.draws import Draws, RequestDraws
from monge.laws.law import one_hot
from monge.laws.proposal import Arbitrary, Proposal
from monge.laws.tree import GrowingTree, TokenTree
from monge.oracle.acceptance import MAX_RUNS
from monge.oracle.exact_law import OracleError, PositionError, exact_law
from monge.transport.bounds import layer_bound
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.linear_program import solve, solve_tree
from monge.transport.random_tree import Path, RandomTree, string_laws
from monge.verify.base import NodeRule, Rule, Verifier, why_no_exactness
from monge.verify.gumbel import Gumbel
from monge.verify.layer import Layer, LayerPass
from monge.verify.optimal import Optimal
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS
from monge.verify.sample_and_match import SampleAndMatch

MAX_TREES_SOLVED: Final = 4000
"""Most trees that the linear program is given: seconds on one core."""

BY_NODES: Final = "enumeration node by node"
BY_TREES: Final = "enumeration tree by tree"
POSITIONS: Final = "draws positions, which cannot be enumerated"
WITHOUT_POSITIONS: Final = (
    "enumeration tree by tree of a layer that decides from the candidates alone; layer itself "
    f"{POSITIONS}"
)


def tree_report(table: TreeTable, on_rule: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Compute E[tau] of every verifier that is exact for the tree, the multi-step optimum, and the layer bound.

    Args:
        table: Laws and shape.
        on_rule: Called after every verifier.

    Returns:
        `rules` by verifier (`null` where it cannot be enumerated), `how` they were computed,
        `optimum` (exact, by linear programming over all trees), `layer_bound`, `gap` to the
        optimum, and the tree's description.

    Raises:
        OptionError: If the trees are too many to list.
    """
    trees = random_tree(table)
    best = solve_tree(trees, table.target_probs).expected_accepted
    limits = table.builder.limits
    report: dict[str, Any] = {"rules": {}, "how": {}, "gap": {}}
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        if why_no_exactness(rule, limits.proposes, limits.max_width) is None:
            value, how = expected_accepted(rule, table)
            report["rules"][name], report["how"][name] = value, how
            report["gap"][name] = None if value is None else best - value
        on_rule()
    return report | {
        "optimum": best,
        "layer_bound": bound(trees, table),
        "num_trees": len(trees.trees),
        "depth": table.depth,
        "candidates": list(table.widths),
        "drafting": table.drafting,
    }


def expected_accepted(rule: Rule, table: TreeTable) -> tuple[float | None, str]:
    """Return E[tau] and how it was found: node by node for a node rule, tree by tree for others.

    Rules that draw positions are replaced by the ones that decide from the candidates alone, with
    the same probabilities; for `layer` the second value says so.
    """
    if isinstance(rule, Optimal):
        rule = OptimalGivenCandidates()
    if isinstance(rule, Gumbel):
        rule = (
            SampleAndMatch()
        )  # its races do not know candidates that are drawn without its clocks
    try:
        if isinstance(rule, NodeRule):
            return _below((), 1, rule, table), BY_NODES
        try:
            return _by_trees(rule, table), BY_TREES
        except PositionError:
            if not isinstance(rule, Layer) or rule.inner is not None:
                return None, POSITIONS
            return _by_trees(Layer(OptimalGivenCandidates()), table), WITHOUT_POSITIONS
    except OracleError as error:
        return None, str(error)


def random_tree(table: TreeTable) -> RandomTree:
    """Return every tree that can be drawn, with its probability.

    Raises:
        OptionError: If they are too many to list.
    """

    def children(path: Path) -> CandidateLaw:
        drawn = exact_law(propose(table, path).draw, max_runs=MAX_RUNS)
        return CandidateLaw.explicit(len(table.tokens), drawn)

    if table.drafting == PATHS:
        trees = RandomTree.from_paths(table.draft_probs, depth=table.depth, width=table.widths[0])
    else:
        trees = RandomTree.from_children(children, table.depth)
    if len(trees.trees) > MAX_TREES_SOLVED:
        raise OptionError(
            f"tree: {len(trees.trees)} different trees, at most {MAX_TREES_SOLVED}; take a "
            "smaller vocabulary, depth or width"
        )
    return trees


def bound(trees: RandomTree, table: TreeTable) -> float:
    """Return an upper bound of E[tau]: one single-step optimum per layer, over strings instead of tokens.

    P(tau >= d) is the probability that the first d tokens of the output are a node of the tree,
    which no coupling of its layer's nodes with the target's strings exceeds. For independent paths:
    `transport.bounds.layer_bound`.
    """
    if table.drafting == PATHS:
        return layer_bound(
            table.target_probs, table.draft_probs, depth=table.depth, width=table.widths[0]
        )
    total = 0.0
    for depth, law in enumerate(string_laws(table.target_probs, table.depth)[1:], start=1):
        layers = [
            tuple(sorted(node for node in nodes if len(node) == depth)) for nodes in trees.trees
        ]
        strings = sorted(law.keys() | {node for layer in layers for node in layer})
        number = {string: index for index, string in enumerate(strings)}
        masses: dict[tuple[int, ...], float] = {}
        for layer, prob in zip(layers, trees.probs.tolist(), strict=True):
            candidate_ids = tuple(number[node] for node in layer)
            masses[candidate_ids] = masses.get(candidate_ids, 0.0) + prob
        target = np.array([law.get(string, 0.0) for string in strings])
        total += solve(TransportProblem.from_joint_law(target, masses)).acceptance
    return total


def propose(table: TreeTable, path: Path, copies: int = 1) -> Proposal:
    """Return the proposal with which the tree builder draws the children of a node.

    Args:
        table: Laws and shape.
        path: Tokens on the way to the node.
        copies: Draws of its parent that gave the node; the paths that pass it.
    """
    tree, node = GrowingTree(0), 0
    unused = RequestDraws(0)  # the proposal is needed, not its draws
    for token in path:
        (node,) = tree.grow(node, Arbitrary((token,) * copies), unused)
    table.builder.expand(tree, (node,), (table.draft[path],), DraftPlan(), unused)
    return tree.finish().proposals[node]


def grow(table: TreeTable, draws: Draws) -> TokenTree:
    """Draw a tree, by the tree builder."""
    tree, paths = GrowingTree(0), dict[int, Path]({0: ()})
    frontier: Sequence[int] = (0,)
    while frontier:
        laws = [table.draft[paths[node]] for node in frontier]
        frontier = table.builder.expand(tree, frontier, laws, DraftPlan(), draws)
        paths |= {node: (*paths[tree.parents[node]], tree.token_ids[node]) for node in frontier}
    return table.builder.finish(tree, DraftPlan())


def _below(path: Path, copies: int, rule: NodeRule, table: TreeTable) -> float:
    """E[accepted tokens below a node that was reached], its children being drawn independently of everything above."""
    if len(path) == table.depth:
        return 0.0
    proposal = propose(table, path, copies)

    def emitted(draws: Draws) -> tuple[int, int]:
        """The token, and how often it was drawn; zero times if it is no candidate."""
        candidate_ids = proposal.draw(draws)
        token = rule.emit(table.target[path], proposal, candidate_ids, draws)
        return token, candidate_ids.count(token)

    return math.fsum(
        prob * (1.0 + _below((*path, token), again, rule, table))
        for (token, again), prob in exact_law(emitted, max_runs=MAX_RUNS).items()
        if again
    )


def _by_trees(rule: Verifier, table: TreeTable) -> float:
    """E[accepted tokens], over all trees that the builder draws and all decisions of the rule."""

    def expected(draws: Draws) -> float:
        tree = grow(table, draws)
        # Laws after the last level decide nothing: a point mass has one branch.
        laws = [
            table.target[tree.path_tokens(node)] if depth < table.depth else one_hot(0)
            for node, depth in enumerate(tree.depths)
        ]
        if isinstance(rule, Layer):
            return expected_by_layers(rule, ScoredTree(tree=tree, target_laws=laws, draws=draws))
        return rule.verify(tree, laws, draws).num_accepted

    return math.fsum(count * prob for count, prob in exact_law(expected, max_runs=MAX_RUNS).items())


def expected_by_layers(rule: Layer, scored: ScoredTree) -> float:
    """Return the weights of the first pass of Layer Verification, added up: their mean is E[accepted tokens]."""
    layers = LayerPass(scored)
    while layers.is_open:
        layers.descend([rule.flow(problem) for problem in layers.problems()])
    return layers.expected_accepted
