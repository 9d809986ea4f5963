"""Tree builders against their definitions, on small tables."""

import pytest
import torch

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.best_first import BestFirst, Eagle2
from monge.laws.draws import TapeDraws
from monge.laws.law import DenseLaw
from monge.laws.tree import GrowingTree, TokenTree
from monge.oracle.tabular import RandomTable

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


def test_sizes_are_checked() -> None:
    with pytest.raises(OptionError, match="eagle2: depth must be at least 1; got 0"):
        Eagle2(depth=0)
    with pytest.raises(OptionError, match="num_nodes must be at least 1"):
        Eagle2(num_nodes=0)
