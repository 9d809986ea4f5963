"""The multi-step optimum by linear programming."""

import numpy as np
import pytest

from monge.core.errors import LawError, OptionError
from monge.transport.bounds import iid_optimum, layer_bound
from monge.transport.candidates import CandidateLaw
from monge.transport.linear_program import solve_tree
from monge.transport.random_tree import RandomTree
from tests.transport.reference_forms import block_acceptance
from tests.transport.strategies import as_law

LP = 1e-9


def table(seed, num_tokens, concentration=0.7):
    """A tabular model: every prefix has its own law, some with zeros."""

    def law(path):
        rng = np.random.default_rng([seed, len(path), *path])
        weights = rng.gamma(concentration, size=num_tokens)
        weights[rng.random(num_tokens) < 0.15] = 0.0
        return as_law(weights if weights.any() else np.ones(num_tokens))

    return law


def token_level(target, draft, depth, width, path=()):
    """E[tau] of per-node optimal rules on `width` children of every node."""
    if depth == 0:
        return 0.0
    p, q = target(path), draft(path)
    alpha = iid_optimum(p, q, width)
    from tests.transport.reference_forms import rearrangement_coupling

    coupling = rearrangement_coupling(p, q, width)
    candidates = coupling.problem.candidates
    emitted = candidates.probs @ (candidates.membership * coupling.conditional_laws)
    deeper = [
        emitted[token] * token_level(target, draft, depth - 1, width, (*path, int(token)))
        for token in np.flatnonzero(emitted)
    ]
    return alpha.acceptance + sum(deeper)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_tokens", "depth"), [(2, 3), (3, 2), (3, 3)])
def test_one_path_is_block_verification(seed, num_tokens, depth):
    target, draft = table(seed, num_tokens), table(100 + seed, num_tokens)
    best = solve_tree(RandomTree.from_paths(draft, depth=depth, width=1), target)
    block = block_acceptance(target, draft, depth=depth)
    assert best.expected_accepted == pytest.approx(block, abs=LP)
    assert block <= layer_bound(target, draft, depth=depth, width=1) + LP
    assert block >= token_level(target, draft, depth, 1) - LP


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [2, 3])
def test_depth_one_is_the_optimum_of_the_node(seed, width):
    target, draft = table(seed, 4), table(50 + seed, 4)
    best = solve_tree(RandomTree.from_paths(draft, depth=1, width=width), target).expected_accepted
    assert best == pytest.approx(iid_optimum(target(()), draft(()), width).acceptance, abs=LP)
    assert best == pytest.approx(layer_bound(target, draft, depth=1, width=width), abs=LP)


@pytest.mark.parametrize("seed", range(3))
def test_two_paths_lie_between_their_bounds(seed):
    target, draft = table(seed, 3), table(70 + seed, 3)
    best = solve_tree(RandomTree.from_paths(draft, depth=2, width=2), target).expected_accepted
    assert best <= layer_bound(target, draft, depth=2, width=2) + LP
    assert best >= block_acceptance(target, draft, depth=2) - LP
    children = RandomTree.from_children(lambda path: CandidateLaw.iid(draft(path), 2), 2)
    wider = solve_tree(children, target).expected_accepted
    assert wider >= token_level(target, draft, 2, 2) - LP


def test_weights_are_those_of_a_lossless_verifier():
    target, draft = table(1, 3), table(2, 3)
    children = lambda path: CandidateLaw.without_replacement(draft(path), 2)  # noqa: E731
    made = RandomTree.from_children(children, 2)
    best = solve_tree(made, target)
    visited = {}
    for nodes, prob, weights in zip(made.trees, made.probs, best.weights, strict=True):
        assert weights.keys() == nodes
        for parent in {node[:-1] for node in nodes}:
            below = sum(weight for node, weight in weights.items() if node[:-1] == parent)
            assert below <= (weights[parent] if parent else 1.0) + LP
        for node, weight in weights.items():
            assert weight >= 0.0
            visited[node] = visited.get(node, 0.0) + prob * weight
    assert sum(visited.values()) == pytest.approx(best.expected_accepted, abs=LP)
    for node, mass in visited.items():
        assert mass <= (visited[node[:-1]] if node[:-1] else 1.0) * target(node[:-1])[node[-1]] + LP


def test_enumeration_of_trees():
    random_tree = RandomTree.from_paths(lambda _: np.array([0.5, 0.5]), depth=1, width=2)
    assert dict(zip(random_tree.trees, random_tree.probs.tolist(), strict=True)) == {
        frozenset({(0,)}): 0.25,
        frozenset({(0,), (1,)}): 0.5,
        frozenset({(1,)}): 0.25,
    }
    # A node that two paths go through continues both: with one path it could not have two children.
    both = frozenset({(0,), (0, 0), (0, 1)})
    deep = RandomTree.from_paths(lambda _: np.array([0.5, 0.5]), depth=2, width=2)
    assert deep.probs[deep.trees.index(both)] == pytest.approx(0.125)


def test_products_that_vanish():
    """A tree whose probability is below the smallest number is none."""
    tree = RandomTree.from_children(lambda path: CandidateLaw.iid(np.array([1.0, 1e-300]), 1), 2)
    assert sorted(map(len, tree.trees)) == [2, 2, 2]
    assert tree.probs.sum() == 1.0


def test_an_empty_tree_accepts_nothing():
    empty = RandomTree.from_children(lambda _: CandidateLaw.deterministic(2, ()), 2)
    assert solve_tree(empty, lambda _: np.array([0.5, 0.5])).expected_accepted == 0.0


def test_random_trees_refuse_bad_trees_and_probabilities():
    with pytest.raises(LawError, match="lack their parent"):
        RandomTree(trees=(frozenset({(0, 1)}),), probs=np.array([1.0]))
    with pytest.raises(LawError, match="sum to 1"):
        RandomTree(trees=(frozenset({(0,)}),), probs=np.array([0.9]))
    with pytest.raises(LawError, match="must be distinct"):
        RandomTree(trees=(frozenset({(0,)}),) * 2, probs=np.array([0.5, 0.5]))
    with pytest.raises(OptionError, match="more than 16384"):
        RandomTree.from_children(lambda _: CandidateLaw.iid(np.full(6, 1 / 6), 3), 2)
