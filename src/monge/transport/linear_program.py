"""The optimum by linear programming: any small joint law, of a node or of a whole tree.

Slow, general, and assumes nothing.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack

from monge.core.errors import MongeError
from monge.transport.candidates import TransportProblem
from monge.transport.coupling import Coupling
from monge.transport.laws import Tabular, check_law
from monge.transport.random_tree import Path, RandomTree

FEASIBILITY: Final = 1e-10
"""Primal and dual feasibility tolerance of HiGHS, the smallest that it accepts.

The flow is made feasible afterwards, so this bounds only how far the optimum may be missed.
"""


def solve(problem: TransportProblem) -> Coupling:
    """The optimal coupling of a node.

    Law:
        The output law is p: the flow is scaled into the feasible set after the solver, and
        completed.

    Rule:
        Maximise sum S(i, t) over S >= 0, i in t, subject to sum_i S(i, t) <= P(t) and sum_t S(i, t)
        <= p_i.

    Cost:
        One variable per candidate of every tuple: exponential in the number of candidates.

    Reference:
        Optimal transport with membership cost (SpecTr, arXiv 2310.15141, section 3); relaxed form
        (Global Resolution, arXiv 2511.15898).
    """
    candidates = problem.candidates
    tuples, tokens = np.nonzero(candidates.membership)
    if tuples.size == 0:
        return Coupling(
            problem=problem, flow=np.zeros((len(candidates.tuples), candidates.num_tokens))
        )
    limits = np.concatenate([candidates.probs, problem.target])
    rows = vstack([_sums(tuples, candidates.probs.size), _sums(tokens, problem.target.size)])
    masses = _maximise(np.ones(tuples.size), rows, limits)
    flow = np.zeros((len(candidates.tuples), candidates.num_tokens))
    flow[tuples, tokens] = np.maximum(masses, 0.0)
    flow *= _shrink(flow.sum(axis=1), candidates.probs)[:, None]
    flow *= _shrink(flow.sum(axis=0), problem.target)
    return Coupling(problem=problem, flow=flow)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeOptimum:
    """The best that any lossless verifier can do with a random tree.

    Args:
        expected_accepted: E[tau], accepted draft tokens per round; block efficiency is this plus 1.
        weights: W_v(tree) = P(node v is on the emitted path | tree), a mapping per tree, the root
            left out.
    """

    expected_accepted: float
    weights: tuple[dict[Path, float], ...]


def solve_tree(random_tree: RandomTree, target: Tabular) -> TreeOptimum:
    """The exact multi-step optimum.

    Law:
        A verifier emits a root-to-node path and one more token, so that the string, continued by
        the target, has the target's law. The weights W_v(tree) of such verifiers are exactly the
        points of the polytope below.

    Rule:
        Maximise sum_v E[W_v] subject to W_root = 1, sum over children of W <= W_v in every tree,
        and E[W_vx] <= E[W_v] p(x | v) for every node v and token x.

    Cost:
        One variable per node of every tree.

    Reference:
        Block Verification (Sun et al., arXiv 2403.10444) gives the optimum for a single path in
        closed form, which this equals.
    """
    columns = [
        (tree, node) for tree, nodes in enumerate(random_tree.trees) for node in sorted(nodes)
    ]
    weights: tuple[dict[Path, float], ...] = tuple({} for _ in random_tree.trees)
    if not columns:
        return TreeOptimum(expected_accepted=0.0, weights=weights)
    # The variables are the flows P(tree) W_v(tree): all coefficients are then zero, one, or a
    # target probability.
    rows, limits = _tree_constraints(random_tree, columns, target)
    flow = _maximise(np.ones(len(columns)), rows, limits)
    for (tree, node), mass in zip(columns, flow.tolist(), strict=True):
        weights[tree][node] = mass / float(random_tree.probs[tree])
    return TreeOptimum(expected_accepted=float(flow.sum()), weights=weights)


def _tree_constraints(
    random_tree: RandomTree, columns: list[tuple[int, Path]], target: Tabular
) -> tuple[coo_array, Float64[np.ndarray, " rows"]]:
    families = {
        family: row
        for row, family in enumerate(sorted({(tree, node[:-1]) for tree, node in columns}))
    }
    nodes = {
        node: row
        for row, node in enumerate(sorted({node for _, node in columns}), start=len(families))
    }
    laws = {
        parent: check_law(f"target after {parent}", target(parent)).tolist()
        for _, parent in families
    }
    children: dict[Path, list[Path]] = {}
    for node in nodes:
        children.setdefault(node[:-1], []).append(node)
    entries: list[tuple[int, int, float]] = []  # row, column, coefficient
    for column, (tree, node) in enumerate(columns):
        entries.append((families[tree, node[:-1]], column, 1.0))
        entries.append((nodes[node], column, 1.0))
        if (tree, node) in families:
            entries.append((families[tree, node], column, -1.0))
        entries.extend(
            (nodes[child], column, -laws[node][child[-1]]) for child in children.get(node, [])
        )
    limits = [0.0 if parent else float(random_tree.probs[tree]) for tree, parent in families]
    limits += [0.0 if node[:-1] else laws[()][node[-1]] for node in nodes]
    rows, cols, values = (np.array(part) for part in zip(*entries, strict=True))
    return coo_array((values, (rows, cols)), shape=(len(limits), len(columns))), np.array(limits)


def _maximise(
    gains: Float64[np.ndarray, " columns"], rows: object, limits: Float64[np.ndarray, " rows"]
) -> np.ndarray:
    result = linprog(
        -gains,
        A_ub=rows,
        b_ub=limits,
        bounds=(0, None),
        method="highs",
        options={
            "primal_feasibility_tolerance": FEASIBILITY,
            "dual_feasibility_tolerance": FEASIBILITY,
        },
    )
    if result.status != 0:
        raise MongeError(
            f"linear program: HiGHS stopped with status {result.status}: {result.message}"
        )
    return np.asarray(result.x)


def _sums(groups: Int64[np.ndarray, " columns"], num_groups: int) -> coo_array:
    """The matrix whose row g adds up the columns of group g."""
    ones = np.ones(groups.size)
    return coo_array((ones, (groups, np.arange(groups.size))), shape=(num_groups, groups.size))


def _shrink(
    masses: Float64[np.ndarray, " n"], limits: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Factors, at most 1, that bring masses under their limits."""
    return np.divide(limits, masses, out=np.ones_like(masses), where=masses > limits)
