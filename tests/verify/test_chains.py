"""Whole chains: the law of the first tokens, the expected number of accepted ones, and its optimum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monge.core.errors import ProposalMismatchError
from monge.laws.draws import SeededDraws
from monge.laws.law import DenseLaw
from monge.laws.proposal import Arbitrary, Deterministic, Iid
from monge.oracle.exact_law import exact_law
from monge.transport.linear_program import solve_tree
from monge.transport.random_tree import RandomTree
from monge.verify.base import Verifier, Walk
from monge.verify.block import Block
from monge.verify.functional.where import share
from monge.verify.speculative_sampling import SpeculativeSampling
from tests.kit.strategies import weight_lists
from tests.transport.reference_forms import block_acceptance
from tests.verify.acceptance import EXACT
from tests.verify.whole_trees import Tables, expected_accepted, grown, random_tables, text_error


def iid(tables: Tables, depth: int):  # type: ignore[no-untyped-def]
    return lambda path: Iid(tables.draft(path)) if len(path) < depth else None


def check(tables: Tables, depth: int) -> float:
    """Law error of the block rule is rounding.

    Returns how much more it accepts than the token-level rule.
    """
    children = iid(tables, depth)
    assert text_error(Block(), tables, children, depth + 1) < EXACT
    block = expected_accepted(Block(), tables, children)
    assert block == pytest.approx(
        block_acceptance(tables.target_masses, tables.draft_masses, depth=depth), abs=EXACT
    )
    gain = block - expected_accepted(Walk(SpeculativeSampling()), tables, children)
    assert gain >= -EXACT
    return gain


@st.composite
def two_levels(draw) -> Tables:  # type: ignore[no-untyped-def]
    """Chains of two tokens over two or three tokens.

    Unrelated laws with zeros and ties, or equal laws at some nodes.
    """
    vocab = draw(st.integers(2, 3))
    paths = [(), *((token,) for token in range(vocab))]
    paths += [(*path, token) for path in paths[1:] for token in range(vocab)]
    targets = {path: draw(weight_lists(vocab)) for path in paths}
    drafts = {
        path: targets[path] if draw(st.booleans()) else draw(weight_lists(vocab)) for path in paths
    }
    return Tables(targets, drafts)


@settings(max_examples=25)
@given(tables=two_levels())
def test_laws_with_zeros_ties_and_equal_nodes(tables: Tables) -> None:
    check(tables, 1)
    check(tables, 2)


@pytest.mark.parametrize("seed", range(12))
def test_three_tokens(seed: int) -> None:
    check(random_tables(vocab=3, depth=3, seed=seed), 3)


def test_the_multi_step_optimum() -> None:
    gains = []
    for seed in range(6):
        tables = random_tables(vocab=2, depth=3, seed=seed)
        gains.append(check(tables, 3))
        best = solve_tree(
            RandomTree.from_paths(tables.draft_masses, depth=3, width=1), tables.target_masses
        )
        assert expected_accepted(Block(), tables, iid(tables, 3)) == pytest.approx(
            best.expected_accepted, abs=1e-8
        )
    assert max(gains) > 1e-3  # it is more than the token-level rule


@pytest.mark.parametrize("same_until", [0, 1, 2, 3])
def test_equal_laws_down_to_a_depth(same_until: int) -> None:
    """p = q at the first nodes, or at all: S + 1 - a vanishes there."""
    tables = random_tables(vocab=3, depth=3, seed=5)
    drafts = {
        path: tables.targets[path] if len(path) < same_until else law
        for path, law in tables.drafts.items()
    }
    same = Tables(tables.targets, drafts)
    check(same, 3)
    if same_until == 3:
        assert expected_accepted(Block(), same, iid(same, 3)) == pytest.approx(3.0, abs=EXACT)


def test_nothing_undecided_is_no_division_by_zero() -> None:
    """Only rounding can ask for it, so no enumeration does."""
    assert share(0.0, 1.0) == 0.0
    assert share(0.0, 0.5) == 0.0
    assert share(1e-17, 1.0) == 1.0


def test_deterministic_tokens_are_sampled_and_matched() -> None:
    tables = random_tables(vocab=3, depth=3, seed=2)

    def top(path):  # type: ignore[no-untyped-def]
        return Deterministic(tables.draft(path).top(1)) if len(path) < 3 else None

    assert text_error(Block(), tables, top, 4) < EXACT
    assert expected_accepted(Block(), tables, top) == pytest.approx(
        expected_accepted(Walk(SpeculativeSampling()), tables, top), abs=EXACT
    )


def test_a_mistaken_residual_is_seen() -> None:
    """The token-level residual after a block decision, the mistake of an early engine, biases the text."""

    class TokenResidual(Verifier):
        accepts, max_width = Block.accepts, 1

        def verify(self, tree, target_laws, draws):  # type: ignore[no-untyped-def]
            verdict = Block().verify(tree, target_laws, draws)
            if verdict.next_kind == "bonus":
                return verdict
            node = verdict.num_accepted
            law = target_laws[node].excess_over(tree.proposals[node].law) or target_laws[node]
            return type(verdict)(
                path=verdict.path, next_token=draws.categorical(law), next_kind="correction"
            )

    errors = [
        text_error(TokenResidual(), tables, iid(tables, 2), 3) for tables in map(small, range(6))
    ]
    assert max(errors) > 1e-3
    assert (
        max(text_error(Block(), tables, iid(tables, 2), 3) for tables in map(small, range(6)))
        < EXACT
    )


def small(seed: int) -> Tables:
    return random_tables(vocab=3, depth=2, seed=seed)


def test_verdicts_count_what_was_stood_on() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)

    def verdicts(draws):  # type: ignore[no-untyped-def]
        tree = grown(iid(tables, 2), draws)
        verdict = Block().verify(tree, tables.laws(tree), draws)
        return verdict.path, verdict.next_kind, verdict.examined

    assert set(exact_law(verdicts)) == {
        ((), "correction", (1,)),
        ((1,), "correction", (1, 1)),
        ((1, 2), "bonus", (1, 1)),
    }


def test_refusals() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)
    draws = torch_draws()
    pair = grown(lambda path: Iid(tables.draft(path), 2) if not path else None, draws)
    with pytest.raises(
        ProposalMismatchError, match="node 0: Block is exact for at most 1 candidate"
    ):
        Block().verify(pair, tables.laws(pair), draws)
    chain = grown(iid(tables, 2), draws)
    with pytest.raises(ProposalMismatchError, match="3 nodes but 1 laws"):
        Block().verify(chain, [tables.target(())], draws)


def test_candidates_of_unknown_origin_are_walked() -> None:
    tables = random_tables(vocab=3, depth=2, seed=1)

    def forged(path):  # type: ignore[no-untyped-def]
        return Arbitrary((0,)) if len(path) < 2 else None

    assert text_error(Block(), tables, forged, 3) < EXACT


def torch_draws():  # type: ignore[no-untyped-def]
    return SeededDraws(3)


def test_laws_may_be_sparse() -> None:
    p = DenseLaw(torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
    q = DenseLaw(torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64))
    for target in (p, p.sparse()):
        for draft in (q, q.sparse()):

            def run(draws, target=target, draft=draft):  # type: ignore[no-untyped-def]
                tree = grown(lambda path: Iid(draft) if not path else None, draws)
                verdict = Block().verify(tree, [target, target], draws)
                return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)[0]

            law = exact_law(run)
            np.testing.assert_allclose(
                [law.get(token, 0.0) for token in range(3)], [0.5, 0.0, 0.5], atol=EXACT
            )
