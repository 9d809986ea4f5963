"""Several paths, one of them selected.

The law of the text, the law of the selected path, and what is accepted.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from monge.core.errors import ProposalMismatchError
from monge.laws.draws import Draws, TapeDraws
from monge.laws.proposal import (
    Arbitrary,
    Deterministic,
    Iid,
    PathDraws,
    Proposal,
    WithoutReplacement,
)
from monge.laws.tree import GrowingTree, TokenTree
from monge.oracle.exact_law import exact_law, law_error
from monge.transport import bounds
from monge.transport.linear_program import solve_tree
from monge.transport.random_tree import RandomTree
from monge.verify.base import Verifier
from monge.verify.block import Block
from monge.verify.layer import Layer
from monge.verify.multipath_block import MultipathBlock, _Order, _select
from tests.verify.acceptance import EXACT
from tests.verify.whole_trees import (
    Path,
    Tables,
    continued,
    grown,
    random_tables,
    tables_of_two_levels,
    text_error,
    width_error,
)


def paths(tables: Tables, num_paths: int, depth: int, draws: Draws) -> TokenTree:
    """K independent paths: a node draws once for each path that passes it."""
    tree, level = GrowingTree(0), {0: ()}
    for _ in range(depth):
        counts = {node: tree.multiplicity(node) if node else num_paths for node in level}
        grown = tree.grow_level(
            {node: PathDraws(tables.draft(path), counts[node]) for node, path in level.items()},
            draws,
        )
        level = {
            child: (*level[node], tree.token_ids[child])
            for node, children in grown.items()
            for child in children
        }
    return tree.finish()


def error(rule: Verifier, tables: Tables, num_paths: int, depth: int) -> float:
    def run(draws: Draws) -> Path:
        tree = paths(tables, num_paths, depth, draws)
        verdict = rule.verify(tree, tables.laws(tree), draws)
        return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)

    return law_error(
        continued(exact_law(run), tables, depth + 1), continued({(): 1.0}, tables, depth + 1)
    )


def accepted(rule: Verifier, tables: Tables, num_paths: int, depth: int) -> float:
    def run(draws: Draws) -> int:
        tree = paths(tables, num_paths, depth, draws)
        return rule.verify(tree, tables.laws(tree), draws).num_accepted

    return sum(count * prob for count, prob in exact_law(run).items())


@settings(max_examples=4)
@given(tables=tables_of_two_levels())
def test_laws_with_zeros_ties_and_equal_nodes(tables: Tables) -> None:
    for num_paths, depth in ((1, 2), (2, 1), (3, 1), (2, 2)):
        assert error(MultipathBlock(), tables, num_paths, depth) < EXACT, (num_paths, depth)


@pytest.mark.parametrize(
    "inner",
    [
        "recursive_rejection",
        "k_seq",
        pytest.param("optimal_given_candidates", marks=pytest.mark.slow),
    ],
)
def test_layers_of_paths(inner: str) -> None:
    """Layer verification takes paths, too.

    A node's draws, as many as paths pass it, are independent given the way there.
    """
    tables = random_tables(vocab=2, depth=2, seed=1)
    for num_paths, depth in ((1, 2), (2, 2), (3, 1)):
        assert error(Layer(inner), tables, num_paths, depth) < EXACT, (num_paths, depth)


@pytest.mark.parametrize(("num_paths", "depth"), [(2, 3), (3, 2)])
def test_more_paths_and_deeper_ones(num_paths: int, depth: int) -> None:
    tables = random_tables(vocab=2, depth=depth, seed=num_paths)
    assert error(MultipathBlock(), tables, num_paths, depth) < EXACT


@pytest.mark.parametrize("widths", [(2, 1), (2, 2), (1, 3)])
def test_trees_whose_nodes_draw_for_themselves(widths: tuple[int, ...]) -> None:
    tables = random_tables(vocab=2, depth=len(widths), seed=7)
    assert width_error(MultipathBlock(), tables, widths, "iid") < EXACT


def test_the_promise_of_paths_is_needed() -> None:
    """Draws that are declared as paths, and are not.

    The law of the selected path is another one.
    """
    errors = []
    for seed in range(4):
        tables = random_tables(vocab=2, depth=2, seed=seed)

        def children(path: Path, tables: Tables = tables) -> Proposal | None:
            return PathDraws(tables.draft(path), 2) if len(path) < 2 else None

        errors.append(text_error(MultipathBlock(), tables, children, 3))
    assert max(errors) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_paths_that_begin_below_a_node_that_draws_for_itself(seed: int) -> None:
    """Two paths begin at every child of a root that draws for itself: their law starts anew."""
    tables = random_tables(vocab=2, depth=2, seed=seed)

    def children(path: Path) -> Proposal | None:
        if len(path) == 2:
            return None
        return (PathDraws if path else Iid)(tables.draft(path), 2)

    assert text_error(MultipathBlock(), tables, children, 3) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_the_selected_path(seed: int) -> None:
    """r, in product, is how often a path is selected."""
    tables = random_tables(vocab=3, depth=2, seed=seed)
    declared: dict[Path, float] = {}

    def run(draws: Draws) -> Path:
        tree = paths(tables, 2, 2, draws)
        path, laws = _select(tree, tables.laws(tree))
        tokens = tuple(tree.token_ids[node] for node in path[1:])
        declared[tokens] = float(
            np.prod([law.prob(token) for law, token in zip(laws, tokens, strict=True)])
        )
        return tokens

    assert law_error(exact_law(run), declared) < EXACT


def test_one_path_is_the_block_rule() -> None:
    for seed in range(10):
        tables = random_tables(vocab=3, depth=3, seed=seed)
        tape = torch.rand(
            40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).tolist()
        tree = paths(tables, 1, 3, TapeDraws(tape[:10]))
        laws = tables.laws(tree)
        assert MultipathBlock().verify(tree, laws, TapeDraws(tape[10:])) == Block().verify(
            tree, laws, TapeDraws(tape[10:])
        )


def test_never_more_than_the_multi_step_optimum() -> None:
    for seed in range(3):
        tables = random_tables(vocab=2, depth=2, seed=seed)
        random_tree = RandomTree.from_paths(tables.draft_masses, depth=2, width=2)
        best = solve_tree(random_tree, tables.target_masses).expected_accepted
        bound = bounds.layer_bound(tables.target_masses, tables.draft_masses, depth=2, width=2)
        found = accepted(MultipathBlock(), tables, 2, 2)
        assert found <= best + 1e-8
        assert best <= bound + 1e-8
        assert found > 0.7 * best


def test_one_token_deep() -> None:
    """sum(min(p, r)), r the law of the largest of K draws.

    A second path may help, and costs something where p = q.
    """
    for weights, others in (([5, 3, 2], [2, 3, 5]), ([5, 3, 2], [5, 3, 2]), ([1, 1, 6], [3, 3, 2])):
        tables = Tables({(): weights, **{(token,): [1, 1, 1] for token in range(3)}}, {(): others})
        p, q = tables.target_masses(()), tables.draft_masses(())
        order = np.argsort(p / q, kind="stable")
        found = []
        for num_paths in (1, 2, 3):
            r = np.diff(np.cumsum(q[order]) ** num_paths, prepend=0.0)
            found.append(accepted(MultipathBlock(), tables, num_paths, 1))
            assert found[-1] == pytest.approx(float(np.minimum(p[order], r).sum()), abs=EXACT)
        assert (found[1] > found[0]) == (weights != others)


def test_long_paths_keep_their_digits() -> None:
    """l and Q are relative to their sum, so a path of probability 1e-600 has a law like any other."""
    p, q = (
        torch.tensor(weights, dtype=torch.float64) for weights in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    )
    tables = Tables({(): [5, 3, 2]}, {(): [2, 3, 5]})
    node = _Order.of(tables.target(()), tables.draft(()))
    assert node.token_ids[node.order].tolist() == [2, 1, 0]
    for below, within in ((0.0, 1.0), (1.0 - 1e-12, 1e-12), (0.3, 0.7)):
        for count in (1, 2, 8):
            law = node.largest(count, below, within)
            assert float(law.probs.sum()) == pytest.approx(1.0, abs=1e-12)
    # All other paths are below: nothing is selected any more.
    nearly_certain = node.largest(4, 1.0 - 1e-15, 1e-15)
    assert (
        law_error(dict(enumerate(nearly_certain.probs.tolist())), dict(enumerate(q.tolist())))
        < 1e-12
    )
    alone = node.largest(4, 0.0, 1.0)
    assert alone.probs.tolist() == pytest.approx([1 - 0.8**4, 0.8**4 - 0.5**4, 0.5**4], abs=1e-15)
    assert float(p.sum()) == 1.0


def test_verdicts_count_what_was_stood_on() -> None:
    tables = random_tables(vocab=2, depth=2, seed=1)

    def verdicts(draws: Draws):  # type: ignore[no-untyped-def]
        tree = paths(tables, 2, 2, draws)
        verdict = MultipathBlock().verify(tree, tables.laws(tree), draws)
        distinct = tuple(
            len(set(tree.candidates[node])) for node in (0, *verdict.path) if tree.candidates[node]
        )
        return verdict.next_kind == (
            "bonus" if verdict.num_accepted == 2 else "correction"
        ), verdict.examined == distinct

    assert set(exact_law(verdicts)) == {(True, True)}


@pytest.mark.parametrize("kind", ["top", "arbitrary"])
def test_other_candidates_are_walked(kind: str) -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)

    def children(path: Path) -> Proposal | None:
        if len(path) == 2:
            return None
        return Deterministic(tables.draft(path).top(2)) if kind == "top" else Arbitrary((2, 0))

    assert text_error(MultipathBlock(), tables, children, 3) < EXACT


def test_other_draws_are_refused() -> None:
    tables = random_tables(vocab=3, depth=1, seed=1)
    tree = grown(
        lambda path: WithoutReplacement(tables.draft(path), 2) if not path else None,
        TapeDraws([0.1, 0.9]),
    )
    with pytest.raises(
        ProposalMismatchError,
        match="node 0: MultipathBlock is exact for Deterministic, Iid candidates only",
    ):
        MultipathBlock().verify(tree, tables.laws(tree), TapeDraws([]))
