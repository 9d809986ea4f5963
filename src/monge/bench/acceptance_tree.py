"""Expected accepted tokens of every verifier on a small tree of tabular laws, by enumeration, and what no verifier exceeds.

p = target law, q = draft law, tau = accepted draft tokens of a round.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from monge.bench.acceptance_node import MAX_RUNS
from monge.bench.acceptance_table import PATHS, TreeTable
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law, one_hot
from monge.core.proposal import Iid, Mixed, Proposal
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.children import children_of
from monge.testing.oracle import OracleError, exact_law
from monge.transport.bounds import layer_bound
from monge.transport.candidates import CandidateLaw
from monge.transport.laws import dense
from monge.transport.linear_program import solve, solve_tree
from monge.transport.problem import TransportProblem
from monge.transport.random_tree import Path, RandomTree, string_laws
from monge.transport.rearrangement_law import rearrangement_coupling
from monge.verify.base import NodeRule, Rule, as_verifier, unsupported_reason
from monge.verify.optimal import Optimal
from monge.verify.registry import VERIFIERS

MAX_TREES_SOLVED: Final = 4000
"""Most trees that the linear program is given: seconds on one core."""

REJECTED: Final = (-1, 0)
"""Outcome of a node where no candidate is accepted; others are a token and how often it was drawn."""


def tree_report(table: TreeTable) -> dict[str, Any]:
    """E[tau] of every verifier that is exact for the tree's candidates, the multi-step optimum, and the layer bound.

    Args:
        table: Laws and shape.

    Returns:
        `rules` by verifier (`null` where it cannot be enumerated), `how` they were computed, `optimum` (exact, by linear
        programming over all trees), `layer_bound`, `gap` to the optimum, and the tree's description.

    Raises:
        OptionError: If the trees are too many to list.
    """
    trees = random_tree(table)
    best = solve_tree(trees, table.target_probs).expected_accepted
    widest = max(table.widths)
    kinds = {type(propose(table, path, widest)) for path in table.paths()}
    report: dict[str, Any] = {"rules": {}, "how": {}, "gap": {}}
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        if unsupported_reason(rule, kinds, widest) is None:
            value, how = expected_accepted(rule, table)
            report["rules"][name], report["how"][name] = value, how
            report["gap"][name] = None if value is None else best - value
    return report | {
        "optimum": best,
        "layer_bound": bound(trees, table),
        "num_trees": len(trees.trees),
        "depth": table.depth,
        "candidates": list(table.widths),
        "drafting": table.drafting,
    }


def expected_accepted(rule: Rule, table: TreeTable) -> tuple[float | None, str]:
    """E[tau] and how it was found: node by node for a node rule, tree by tree for a rule that looks at the whole tree."""
    try:
        if isinstance(rule, NodeRule):
            return _below((), table.widths[0], rule, table), "enumeration node by node"
        if not rule.is_enumerable:
            return None, "draws positions, which cannot be enumerated"
        law = exact_law(lambda draws: _num_accepted(rule, table, draws), max_runs=MAX_RUNS)
    except OracleError as error:
        return None, str(error)
    return math.fsum(count * prob for count, prob in law.items()), "enumeration tree by tree"


def random_tree(table: TreeTable) -> RandomTree:
    """Every tree that can be drawn, with its probability.

    Raises:
        OptionError: If they are too many to list.
    """
    if table.drafting == PATHS:
        trees = RandomTree.from_paths(table.draft_probs, depth=table.depth, width=table.widths[0])
    else:
        trees = RandomTree.from_children(lambda path: _children(table, path), table.depth)
    if len(trees.trees) > MAX_TREES_SOLVED:
        raise OptionError(
            f"tree: {len(trees.trees)} different trees, at most {MAX_TREES_SOLVED}; take a smaller vocabulary, depth or width"
        )
    return trees


def _children(table: TreeTable, path: Path) -> CandidateLaw:
    """Joint law of the children of a node, draw by draw."""
    proposal = propose(table, path, table.widths[len(path)])
    return CandidateLaw.explicit(len(table.tokens), exact_law(proposal.draw, max_runs=MAX_RUNS))


def bound(trees: RandomTree, table: TreeTable) -> float:
    """Upper bound of E[tau]: one single-step optimum per layer, over strings instead of tokens.

    P(tau >= d) is the probability that the first d tokens of the output are a node of the tree, which no coupling of its
    layer's nodes with the target's strings exceeds. For independent paths: `transport.bounds.layer_bound`.
    """
    if table.drafting == PATHS:
        return layer_bound(table.target_probs, table.draft_probs, depth=table.depth, width=table.widths[0])
    total = 0.0
    for depth, law in enumerate(string_laws(table.target_probs, table.depth)[1:], start=1):
        layers = [tuple(sorted(node for node in nodes if len(node) == depth)) for nodes in trees.trees]
        strings = sorted(law.keys() | {node for layer in layers for node in layer})
        number = {string: index for index, string in enumerate(strings)}
        masses: dict[tuple[int, ...], float] = {}
        for layer, prob in zip(layers, trees.probs.tolist(), strict=True):
            offers = tuple(number[node] for node in layer)
            masses[offers] = masses.get(offers, 0.0) + prob
        target = np.array([law.get(string, 0.0) for string in strings])
        total += solve(TransportProblem.from_joint_law(target, masses)).acceptance
    return total


def propose(table: TreeTable, path: Path, width: int) -> Proposal:
    """How the children of a node are drawn; of a path's node, as many as paths go through it."""
    law = table.draft_law(path)
    return Iid(law, width) if table.drafting == PATHS else children_of(table.drafting, law, width)


def grow(table: TreeTable, draws: Draws) -> TokenTree:
    """Draw a tree."""
    tree = GrowingTree(0)
    level: list[tuple[int, Path, int]] = [(0, (), table.widths[0])]
    for _ in range(table.depth):
        below: list[tuple[int, Path, int]] = []
        for node, path, width in level:
            children = tree.grow(node, propose(table, path, width), draws)
            offers = tree.finish().offers[node]
            for child in children:
                copies = offers.count(child)
                below.append((child, (*path, tree.token_ids[child]), _next_width(table, path, copies)))
        level = below
    return tree.finish()


def _next_width(table: TreeTable, path: Path, copies: int) -> int:
    depth = len(path) + 1
    if table.drafting == PATHS or depth == table.depth:
        return copies
    return table.widths[depth]


def _below(path: Path, width: int, rule: NodeRule, table: TreeTable) -> float:
    """E[accepted tokens below a node that was reached], its children being drawn independently of everything above."""
    if len(path) == table.depth:
        return 0.0
    outcomes = _outcomes(rule, table.target_law(path), propose(table, path, width), len(table.tokens))
    return math.fsum(
        prob * (1.0 + _below((*path, token), _next_width(table, path, copies), rule, table))
        for (token, copies), prob in outcomes
    )


def _outcomes(rule: NodeRule, target: Law, proposal: Proposal, num_tokens: int) -> Iterator[tuple[tuple[int, int], float]]:
    """Accepted tokens with the number of times they were drawn, and their probabilities."""
    if isinstance(rule, Optimal):
        yield from _coupled(target, proposal, num_tokens)
        return

    def emitted(draws: Draws) -> tuple[int, int]:
        offers = proposal.draw(draws)
        token = rule.emit(target, proposal, offers, draws)
        return (token, offers.count(token)) if token in offers else REJECTED

    law = exact_law(emitted, max_runs=MAX_RUNS)
    law.pop(REJECTED, None)
    yield from law.items()


def _coupled(target: Law, proposal: Proposal, num_tokens: int) -> Iterator[tuple[tuple[int, int], float]]:
    """Outcomes of the optimal rule, which draws positions: its coupling is integrated instead of enumerated."""
    if not isinstance(proposal, Iid | Mixed):
        # Nothing is drawn, and the rule is the target walk.
        yield from (((token, 1), target.prob(token)) for token in next(iter(exact_law(proposal.draw))))
        return
    fixed = proposal.fixed if isinstance(proposal, Mixed) else ()
    coupling = rearrangement_coupling(dense(target, num_tokens), dense(proposal.law, num_tokens), proposal.width, fixed)
    laws = coupling.conditional_laws
    for row, (offers, prob) in enumerate(coupling.problem.candidates):
        for token in set(offers):
            yield (token, offers.count(token)), prob * float(laws[row, token])


def _num_accepted(rule: Rule, table: TreeTable, draws: Draws) -> int:
    tree = grow(table, draws)
    # What follows the last level decides nothing: a point mass has one branch.
    laws = [
        table.target_law(tree.path_tokens(node)) if depth < table.depth else one_hot(0)
        for node, depth in enumerate(tree.depths)
    ]
    return as_verifier(rule).verify(tree, laws, draws).num_accepted
