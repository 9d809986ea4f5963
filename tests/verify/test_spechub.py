"""SpecHub: the optimum of its pairs, which is that of greedy pairs, and its flow for scaled targets."""

import numpy as np
import pytest
from hypothesis import given, settings

from monge.core.law import Law
from monge.core.proposal import Deterministic, HubPairs
from monge.draft.tree.children import children_of
from monge.testing.oracle import exact_law, law_error
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.linear_program import solve
from monge.verify.spechub import SpecHub
from tests.kit.strategies import dense_law, weight_pairs
from tests.transport import reference_forms
from tests.verify.acceptance import EXACT, acceptance, masses
from tests.verify.flows import check_flow
from tests.verify.test_node_rules import EDGES

Weights = list[int]


def check(pair: tuple[Weights, Weights]) -> None:
    p, q = map(dense_law, pair)
    proposal = HubPairs(q)
    emitted = exact_law(lambda draws: SpecHub().emit(p, proposal, proposal.draw(draws), draws))
    assert law_error(emitted, dict(enumerate(p.probs.tolist()))) < EXACT
    found = acceptance("spechub", p, proposal)
    problem = TransportProblem.from_proposal(masses(pair[0]), proposal)
    assert found == pytest.approx(solve(problem).acceptance, abs=1e-9)
    assert found == pytest.approx(
        acceptance("greedy", p, children_of("greedy_plus_one", q, 2)), abs=EXACT
    )
    # Ties at the top are each room's own to break.
    if np.count_nonzero(pair[1]) > 1 and pair[1].count(max(pair[1])) == 1:
        assert found == pytest.approx(
            reference_forms.spechub_acceptance(masses(pair[0]), masses(pair[1])), abs=EXACT
        )
    for scale in (1.0, 0.6):
        check_flow(SpecHub(), p, scale, proposal)


@settings(max_examples=40)
@given(pair=weight_pairs(max_vocab=5))
def test_laws_with_zeros_and_ties(pair: tuple[Weights, Weights]) -> None:
    check(pair)


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    check(EDGES[name])


def test_a_target_that_is_almost_certain_of_the_hub() -> None:
    """Where the released code takes its shortcut."""
    check(([1, 9999, 0], [3, 4, 2]))


def test_the_declared_pairs_are_the_drawn_ones() -> None:
    for weights in ([2, 3, 5], [0, 1, 1], [0, 4, 0], [1, 0, 6, 3]):
        proposal = HubPairs(dense_law(weights))
        declared = dict(CandidateLaw.from_proposal(len(weights), proposal))
        assert law_error(exact_law(proposal.draw), declared) < EXACT


def test_a_sparse_law_is_the_same_law() -> None:
    p, q = dense_law([5, 3, 0, 2]), dense_law([2, 0, 3, 5])

    def emitted(target: Law, draft: Law) -> dict[int, float]:
        proposal = HubPairs(draft)
        return exact_law(
            lambda draws: SpecHub().emit(target, proposal, proposal.draw(draws), draws)
        )

    for target in (p, p.sparse()):
        assert law_error(emitted(target, q.sparse()), emitted(p, q)) < EXACT


def test_deterministic_candidates_are_the_target_walk() -> None:
    p, q = dense_law([5, 3, 2]), dense_law([2, 3, 5])
    for width in (1, 2, 3):
        proposal = Deterministic(q.top(width))
        assert acceptance("spechub", p, proposal) == pytest.approx(
            sum(p.prob(token) for token in q.top(width)), abs=EXACT
        )
        check_flow(SpecHub(), p, 0.7, proposal)
