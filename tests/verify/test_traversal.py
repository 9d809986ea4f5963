"""Whole trees, from the leaves to the root: the law of the first tokens, and what is accepted."""

import pytest
import torch
from hypothesis import given, settings

from monge.core.errors import ProposalMismatchError
from monge.laws.draws import TapeDraws
from monge.laws.law import trusted_law
from monge.laws.proposal import Arbitrary, Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.laws.tree import TokenTree
from monge.oracle.exact_law import exact_law
from monge.transport.candidates import CandidateLaw
from monge.transport.linear_program import solve_tree
from monge.transport.random_tree import RandomTree
from monge.verify.base import Verifier, Walk
from monge.verify.block import Block
from monge.verify.functional import DraftLaws, children_of, traversal
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.traversal import Traversal
from tests.verify.acceptance import EXACT
from tests.verify.tensor_problems import told
from tests.verify.whole_trees import (
    Tables,
    expected_accepted,
    fixed_width,
    grown,
    random_tables,
    tables_of_two_levels,
    text_error,
    width_error,
)

WAYS = ("without_replacement", "iid", "top", "greedy_plus_one")


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(tables=tables_of_two_levels())
def test_laws_with_zeros_ties_and_equal_nodes(way: str, tables: Tables) -> None:
    for widths in ((2,), (3,), (2, 1), (1, 2)):
        assert width_error(Traversal(), tables, widths, way) < EXACT, widths


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", [(2, 2), (2, 1, 1)])
def test_deeper_trees(way: str, widths: tuple[int, ...]) -> None:
    tables = random_tables(vocab=2, depth=len(widths), seed=4)
    assert width_error(Traversal(), tables, widths, way) < EXACT


def test_never_more_than_the_multi_step_optimum() -> None:
    for seed in range(2):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        children = fixed_width(tables, (2, 2), "without_replacement")
        random_tree = RandomTree.from_children(
            lambda path, tables=tables: CandidateLaw.without_replacement(
                tables.draft_masses(path), 2
            ),
            2,
        )
        best = solve_tree(random_tree, tables.target_masses).expected_accepted
        found = expected_accepted(Traversal(), tables, children)
        assert found <= best + 1e-8
        assert found > 0.8 * best


@pytest.mark.slow
def test_it_accepts_more_than_the_node_by_node_rule_here() -> None:
    gains = []
    for seed in range(4):
        tables = random_tables(vocab=3, depth=2, seed=seed)
        children = fixed_width(tables, (2, 1), "without_replacement")
        found, walked = (
            expected_accepted(rule, tables, children)
            for rule in (Traversal(), Walk(RecursiveRejectionWithoutReplacement()))
        )
        gains.append(found - walked)
    assert sum(gains) > 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_one_child_a_node_is_the_block_rule(seed: int) -> None:
    """The same draws, asked for in the same order, give the same verdict."""
    tables = random_tables(vocab=3, depth=3, seed=seed)
    tape = torch.rand(
        40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    tree = grown(fixed_width(tables, (1, 1, 1), "iid"), TapeDraws(tape[:10]))
    laws = tables.laws(tree)
    assert Traversal().verify(tree, laws, TapeDraws(tape[10:])) == Block().verify(
        tree, laws, TapeDraws(tape[10:])
    )


def test_sorting_the_children_is_seen() -> None:
    """Drawing order is part of the law.

    The most probable child first, whatever was drawn first, biases the text.
    """

    class Sorted(Verifier):
        accepts = Traversal.accepts

        def verify(self, tree, target_laws, draws):  # type: ignore[no-untyped-def]
            candidate_ids = tuple(
                tuple(sorted(children, key=lambda child: tree.token_ids[child]))
                for children in tree.candidates
            )
            resorted = TokenTree(
                token_ids=tree.token_ids,
                parents=tree.parents,
                proposals=tree.proposals,
                candidates=candidate_ids,
            )
            return Traversal().verify(resorted, target_laws, draws)

    errors = []
    for seed in range(4):
        tables = random_tables(vocab=3, depth=1, seed=seed)
        errors.append(width_error(Sorted(), tables, (2,), "without_replacement"))
    assert max(errors) > 1e-2


def test_verdicts_count_what_was_stood_on() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)

    def verdicts(draws):  # type: ignore[no-untyped-def]
        tree = grown(fixed_width(tables, (2, 1), "without_replacement"), draws)
        verdict = Traversal().verify(tree, tables.laws(tree), draws)
        return len(verdict.path), verdict.next_kind, verdict.examined

    assert set(exact_law(verdicts)) == {
        (0, "correction", (2,)),
        (1, "correction", (2, 1)),
        (2, "bonus", (2, 1)),
    }


def test_candidates_of_unknown_origin_are_walked() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    forged = lambda path: Arbitrary((2, 0)) if len(path) < 2 else None  # noqa: E731
    assert text_error(Traversal(), tables, forged, 3) < EXACT


def test_a_law_is_needed_for_every_node() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    tree = grown(lambda path: Deterministic((0, 1)) if not path else None, TapeDraws([]))
    with pytest.raises(ProposalMismatchError, match="3 nodes but 1 laws"):
        Traversal().verify(tree, [tables.target(())], TapeDraws([]))


@pytest.mark.parametrize("kind", [Iid, WithoutReplacement, Mixed, Deterministic])
def test_declared_ways(kind: type[Proposal]) -> None:
    assert kind in Traversal.accepts


@pytest.mark.parametrize("is_fork", [False, True])
def test_rounding_of_a_mass_does_not_change_how_many_draws_are_used(is_fork: bool) -> None:
    """What is below a mass of 0, or of 1e-17 where a machine rounds so, passes over its draws."""
    parents = (-1, 0, 1, 0) if is_fork else (-1, 0, 1, 2)
    token_ids, q = (0, 1, 2, 2), torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    children = children_of(parents)
    proposals = tuple(
        WithoutReplacement(trusted_law(q), len(own)) if own else Deterministic(())
        for own in children
    )
    tree = TokenTree(token_ids=token_ids, parents=parents, candidates=children, proposals=proposals)
    uniforms = torch.tensor([0.5] * 4, dtype=torch.float64)
    found = list[tuple[tuple[int, ...], int, int]]()
    rows = list[torch.Tensor]()
    for mass in (0.0, 1e-17):
        row = torch.tensor([1.0, mass, 0.0], dtype=torch.float64)
        rows.append(row.expand(4, -1))
        draws = TapeDraws(uniforms.tolist())
        verdict = Traversal().verify(tree, [trusted_law(row)] * 4, draws)
        found.append((verdict.path, verdict.next_token, draws.num_drawn))
    together = traversal(
        torch.stack(rows),
        torch.tensor([token_ids] * 2),
        children,
        DraftLaws(q.expand(2, 4, -1)),
        uniforms.expand(2, -1),
    )
    assert told(together) == found == [((), 0, 4)] * 2
