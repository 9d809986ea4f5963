"""Acceptance of the published rules against enumeration of the rules themselves, and against the optimum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum, without_replacement_optimum
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.closed_forms import (
    k_seq_acceptance,
    k_seq_constants,
    naive_tree_acceptance,
    recursive_rejection_acceptance,
    recursive_rejection_without_replacement_acceptance,
)
from tests.transport import reference_rules as rules
from tests.transport.reference_forms import (
    sample_and_match_acceptance,
)
from tests.transport.strategies import EDGES, A, few, half, laws, pairs

EXACT = 1e-12


def check(value, candidates, p, rule):
    problem = TransportProblem(target=p, candidates=candidates)
    accepted, error = rules.acceptance_and_error(problem, rule)
    assert error < EXACT
    assert value == pytest.approx(accepted, abs=EXACT)


def check_all_rules(p, q, width):
    iid, distinct = CandidateLaw.iid(q, width), CandidateLaw.without_replacement(q, width)
    best = iid_optimum(p, q, width).acceptance
    k_seq, walk = k_seq_acceptance(p, q, width), TransportProblem(target=p, candidates=iid)
    for value, rule in (
        (recursive_rejection_acceptance(p, [q] * width), rules.recursive_rejection(p, [q] * width)),
        (k_seq, rules.k_seq(p, q, width)),
        (naive_tree_acceptance(p, q, width), rules.naive_tree(p, q)),
        (sample_and_match_acceptance(walk), lambda _: p),
    ):
        check(value, iid, p, rule)
        assert value <= best + EXACT
    # The guarantee of SpecTr.
    assert k_seq >= (1.0 - (1.0 - 1.0 / width) ** width) * best - EXACT
    value = recursive_rejection_without_replacement_acceptance(p, q, width)
    check(value, distinct, p, rules.recursive_rejection_without_replacement(p, q))
    assert value <= without_replacement_optimum(p, q, width).acceptance + EXACT


@few
@given(pairs(max_tokens=4))
def test_optimal_acceptance_of_every_rule(case):
    check_all_rules(*case)


@pytest.mark.parametrize("name", EDGES)
def test_optimal_acceptance_of_every_rule_on_edge_cases(name):
    p, q, width = EDGES[name]
    check_all_rules(p, q, min(width, 4))


@few
@given(st.integers(2, 4).flatmap(lambda n: st.tuples(laws(n), laws(n), laws(n))))
def test_recursive_rejection_with_different_drafts(case):
    p, *drafts = case
    rule, candidates = rules.recursive_rejection(p, drafts), CandidateLaw.independent(drafts)
    check(recursive_rejection_acceptance(p, drafts), candidates, p, rule)


@few
@given(pairs(max_width=6))
def test_rho_is_rounded_up(case):
    p, q, width = case
    constants = k_seq_constants(p, q, width)
    assert 1.0 <= constants.rho <= width
    assert constants.gamma <= constants.rho * (1.0 + 1e-15)
    assert (p - constants.gamma * np.minimum(p / constants.rho, q)).min() >= -1e-16


def test_rho_is_the_smallest_valid_one():
    rho = k_seq_constants(*A, 2).rho
    beta = np.minimum(A[0] / (rho - 1e-9), A[1]).sum()
    assert 1.0 - (1.0 - beta) ** 2 > (rho - 1e-9) * beta
    assert k_seq_constants(A[0], A[0], 4).rho == 1.0


def test_residual_hits_are_counted():
    constants = k_seq_constants(*A, 2)
    assert k_seq_acceptance(*A, 2, rho=2.0) > k_seq_constants(*A, 2, rho=2.0).accepted + 0.01
    rule = rules.k_seq(*A, 2, rho=2.0)
    check(k_seq_acceptance(*A, 2, rho=2.0), CandidateLaw.iid(A[1], 2), A[0], rule)
    with pytest.raises(LawError, match="rho = 1.2 is below gamma"):
        k_seq_acceptance(*A, 2, rho=1.2)
    # At the smallest rho no residual token can hit.
    assert k_seq_acceptance(*A, 2) == pytest.approx(constants.accepted, abs=1e-9)
    shared = (np.array([0.5, 0.5]), np.array([0.9, 0.1]))
    assert naive_tree_acceptance(*shared, 3) > naive_tree_acceptance(*shared, 1) + 0.05


def test_disjoint_supports_accept_nothing():
    p, q = half(tokens=4, inside=2), half(tokens=4, inside=2)[::-1].copy()
    assert k_seq_acceptance(p, q, 3) == recursive_rejection_acceptance(p, [q] * 3) == 0.0
    assert naive_tree_acceptance(p, q, 3) == 0.0
