"""Tree builders against their definitions, on small tables."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monge.core.context import DraftPlan
from monge.core.draws import TapeDraws
from monge.core.errors import OptionError
from monge.core.law import DenseLaw
from monge.core.tree import GrowingTree, TokenTree
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.best_first import BestFirst, Eagle2
from monge.draft.tree.sequoia import Sequoia, Shape, best_shape
from monge.testing.tabular import RandomTable

VOCAB = 4


def law_after(table: RandomTable, path: tuple[int, ...]) -> DenseLaw:
    masses = torch.tensor(table((0, *path)), dtype=torch.float64)
    return DenseLaw(masses / masses.sum())


def build(
    builder: TreeBuilder, seed: int, plan: DraftPlan | None = None, tape: list[float] | None = None
) -> TokenTree:
    plan, draws = plan or DraftPlan(), TapeDraws(tape or [])
    table, tree, frontier = RandomTable(VOCAB, seed, "positive"), GrowingTree(0), [0]
    while frontier:
        laws = [law_after(table, path_of(tree, node)) for node in frontier]
        frontier = list(builder.expand(tree, frontier, laws, plan, draws))
    return builder.finish(tree, plan)


def path_of(tree: GrowingTree, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*path_of(tree, tree.parents[node]), tree.token_ids[node])


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(1, tree.num_nodes)}


def probability(seed: int, path: tuple[int, ...]) -> float:
    table, total = RandomTable(VOCAB, seed, "positive"), 1.0
    for depth, token in enumerate(path):
        total *= law_after(table, path[:depth]).prob(token)
    return total


def eagle2_as_published(seed: int, top_k: int, depth: int, total: int) -> set[tuple[int, ...]]:
    """Expand the top-k nodes of a level by their top-k tokens; then keep the best of all nodes."""
    table, seen = RandomTable(VOCAB, seed, "positive"), list[tuple[int, ...]]()
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        grown = [(*path, token) for path in level for token in law_after(table, path).top(top_k)]
        seen += grown
        level = sorted(grown, key=lambda path: -probability(seed, path))[:top_k]
    return set(sorted(seen, key=lambda path: -probability(seed, path))[:total])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("top_k", "depth", "total"), [(2, 3, 5), (3, 4, 9), (2, 4, 20)])
def test_eagle2_is_the_published_tree(seed: int, top_k: int, depth: int, total: int) -> None:
    tree = build(Eagle2(total, depth, top_k), seed)
    assert paths(tree) == eagle2_as_published(seed, top_k, depth, total)


@pytest.mark.parametrize("seed", range(4))
def test_best_first_with_a_wide_beam_is_the_best_tree_and_grows_with_the_budget(seed: int) -> None:
    everything = [path for depth in (1, 2, 3) for path in _strings(depth)]
    values = []
    for num_nodes in (1, 3, 6, 12):
        tree = build(BestFirst(num_nodes, 3, VOCAB, num_nodes), seed)
        value = sum(probability(seed, path) for path in paths(tree))
        best = sum(
            sorted((probability(seed, path) for path in everything), reverse=True)[:num_nodes]
        )
        assert value == pytest.approx(best, abs=1e-12)
        values.append(value)
    assert values == sorted(values)


def _strings(depth: int) -> list[tuple[int, ...]]:
    return (
        [()]
        if depth == 0
        else [(*path, token) for path in _strings(depth - 1) for token in range(VOCAB)]
    )


def shapes(num_nodes: int, depth: int, width: int) -> Iterator[Shape]:
    """Every static tree with so many drafted nodes."""
    if num_nodes == 0:
        yield Shape()
    elif depth > 0:
        for children in forests(num_nodes, depth, width):
            yield Shape(children)


def forests(num_nodes: int, depth: int, width: int) -> Iterator[tuple[Shape, ...]]:
    if num_nodes == 0:
        yield ()
    elif width > 0:
        for first in range(1, num_nodes + 1):
            for head in shapes(first - 1, depth - 1, 3):
                for tail in forests(num_nodes - first, depth, width - 1):
                    yield (head, *tail)


@given(
    weights=st.tuples(*(st.integers(0, 9) for _ in range(4))).filter(
        lambda weights: sum(weights[:3]) > 0
    ),
    num_nodes=st.integers(1, 5),
    depth=st.integers(1, 4),
)
def test_sequoia_equals_enumeration(weights: tuple[int, ...], num_nodes: int, depth: int) -> None:
    acceptance = tuple(weight / sum(weights) for weight in weights[:3])
    best = max(
        shape.expected_tokens(acceptance)
        for size in range(num_nodes + 1)
        for shape in shapes(size, depth, 3)
    )
    shape = best_shape(num_nodes, depth, acceptance)
    assert shape.expected_tokens(acceptance) == pytest.approx(best, abs=1e-12)
    assert shape.num_nodes <= num_nodes + 1
    assert shape.depth <= depth


def test_sequoia_builds_its_shape_and_shrinks_with_the_plan() -> None:
    builder = Sequoia(8, 3, (0.5, 0.3, 0.1))
    shape = builder.shape(DraftPlan())
    tree = build(builder, 1, tape=[0.3] * 30)
    assert tree.num_nodes == shape.num_nodes
    assert [len(tree.candidates[0])] == [len(shape.children)]
    first_sizes = [
        sum(1 for node in range(1, tree.num_nodes) if tree.path(node)[0] == child)
        for child in tree.candidates[0]
    ]
    assert first_sizes == [child.num_nodes for child in shape.children]
    for plan in (
        DraftPlan(max_nodes=3),
        DraftPlan(max_depth=1),
        DraftPlan(max_depth=2, max_nodes=5),
    ):
        small = build(builder, 1, plan, [0.3] * 30)
        assert small.num_nodes - 1 <= plan.nodes(99)
        assert max(small.depths) <= plan.depth(99)


@pytest.mark.parametrize("acceptance", [(), (0.6, 0.5), (0.5, -0.1), (float("nan"),)])
def test_sequoia_refuses_chances_that_are_none(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match="sequoia: acceptance lists the chance"):
        Sequoia(acceptance=acceptance)


def test_sizes_are_checked() -> None:
    with pytest.raises(OptionError, match="eagle2: depth must be at least 1; got 0"):
        Eagle2(depth=0)
    with pytest.raises(OptionError, match="num_nodes must be at least 1"):
        Eagle2(num_nodes=0)
