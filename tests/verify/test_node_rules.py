"""Acceptance of every node rule: its closed form, and never more than the optimum for the way its candidates are drawn."""

import pytest
from hypothesis import given, settings

from monge.draft.tree.children import way_of_drawing
from monge.laws.proposal import Deterministic, Iid, Mixed
from monge.transport import bounds, closed_forms
from monge.transport.candidates import TransportProblem
from monge.transport.linear_program import solve
from monge.verify.k_seq import divisors
from tests.kit.strategies import dense_law, weight_pairs
from tests.transport import reference_forms
from tests.verify.acceptance import EXACT, acceptance, masses

EDGES = {
    "worked example": ([5, 3, 2], [2, 3, 5]),
    "equal": ([5, 3, 2], [5, 3, 2]),
    "ties": ([1, 1, 1, 1], [1, 1, 1, 1]),
    "disjoint": ([1, 1, 0, 0], [0, 0, 1, 1]),
    "draft is a point": ([5, 3, 2], [0, 1, 0]),
    "target is a point": ([0, 1, 0], [2, 3, 5]),
    "zeros on both sides": ([0, 3, 1, 0], [2, 0, 1, 0]),
}


def check_iid(pair: tuple[list[int], list[int]], width: int) -> None:
    (p, q), (p_masses, q_masses) = map(dense_law, pair), map(masses, pair)
    best = bounds.iid_optimum(p_masses, q_masses, width).acceptance
    closed = {
        "naive_tree": closed_forms.naive_tree_acceptance,
        "k_seq": closed_forms.k_seq_acceptance,
    }
    for name, form in closed.items():
        found = acceptance(name, p, Iid(q, width))
        assert found == pytest.approx(form(p_masses, q_masses, width), abs=EXACT), name
        assert found <= best + EXACT, name
    guarantee = (1.0 - (1.0 - 1.0 / width) ** width) * best
    assert acceptance("k_seq", p, Iid(q, width)) >= guarantee - EXACT


def check_greedy(pair: tuple[list[int], list[int]], width: int) -> None:
    (p, q), (p_masses, q_masses) = map(dense_law, pair), map(masses, pair)
    proposal = way_of_drawing("greedy_plus_one").propose(q, width)
    assert isinstance(proposal, Mixed)
    assert proposal.width == 1
    assert len(proposal.fixed) == min(width, len(q.top(width))) - 1
    best = solve(TransportProblem.from_proposal(p_masses, proposal)).acceptance
    found = acceptance("greedy", p, proposal)
    assert found == pytest.approx(best, abs=1e-9)
    assert found == pytest.approx(
        bounds.mixed_optimum(
            p_masses, proposal.fixed, masses_of(proposal, p_masses.size), 1
        ).acceptance,
        abs=EXACT,
    )
    # Which of several equally probable tokens is on top is left to each room.
    if len(set(pair[1])) == len(pair[1]):
        assert found == pytest.approx(
            reference_forms.greedy_acceptance(p_masses, q_masses, width), abs=EXACT
        )
    assert acceptance("recursive_rejection", p, proposal) <= found + EXACT


def masses_of(proposal: Mixed, size: int):  # type: ignore[no-untyped-def]
    law = proposal.law.sparse()
    dense = masses([1] * size) * 0.0
    dense[law.token_ids.numpy()] = law.probs.numpy()
    return dense


@settings(max_examples=12)
@given(pair=weight_pairs(max_vocab=4))
def test_node_rules_accept_their_closed_forms(pair: tuple[list[int], list[int]]) -> None:
    for width in (1, 2, 3):
        check_iid(pair, width)
        check_greedy(pair, width)


@pytest.mark.parametrize("name", EDGES)
def test_node_rules_accept_their_closed_forms_on_edge_cases(name: str) -> None:
    for width in (1, 2, 4):
        check_iid(EDGES[name], width)
        check_greedy(EDGES[name], width)


def test_the_worked_example() -> None:
    p, q = dense_law([5, 3, 2]), dense_law([2, 3, 5])
    assert acceptance("k_seq", p, Iid(q, 2)) == pytest.approx(0.791355, abs=1e-6)
    assert divisors(p, q, 2)[0] == pytest.approx(1.456776, abs=1e-6)
    assert acceptance(
        "greedy", p, way_of_drawing("greedy_plus_one").propose(q, 2)
    ) == pytest.approx(0.9, abs=EXACT)


@settings(max_examples=25)
@given(pair=weight_pairs(max_vocab=5))
def test_rho_is_rounded_up(pair: tuple[list[int], list[int]]) -> None:
    (p, q), (p_masses, q_masses) = map(dense_law, pair), map(masses, pair)
    for width in (1, 2, 3, 8):
        rho, gamma = divisors(p, q, width)
        assert 1.0 <= rho <= width
        assert gamma <= rho or width == 1
        theirs = closed_forms.k_seq_constants(p_masses, q_masses, width)
        assert (rho, gamma) == pytest.approx((theirs.rho, theirs.gamma), abs=EXACT)


def test_deterministic_candidates_are_sampled_and_matched() -> None:
    p, q = dense_law([5, 3, 2, 0]), dense_law([2, 3, 5, 1])
    for name in ("naive_tree", "k_seq", "greedy"):
        for width in (1, 2, 3):
            proposal = Deterministic(q.top(width))
            assert acceptance(name, p, proposal) == pytest.approx(
                sum(p.prob(token) for token in q.top(width)), abs=EXACT
            )


def test_a_support_smaller_than_the_width_is_offered_whole() -> None:
    proposal = way_of_drawing("greedy_plus_one").propose(dense_law([0, 2, 0, 1]), 4)
    assert isinstance(proposal, Mixed)
    assert proposal.fixed == (1,)
    assert proposal.law.prob(3) == 1.0
