"""Closed forms of the optimum against the linear program."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monge.core.errors import LawError, OptionError
from monge.transport.bounds import (
    acceptance_one,
    greedy_optimum,
    greedy_proposal,
    iid_optimum,
    mixed_optimum,
    without_replacement_optimum,
)
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.laws import check_pair
from monge.transport.linear_program import solve
from tests.transport.reference_forms import (
    different_drafts_optimum,
    greedy_acceptance,
    speculative_sampling_acceptance,
    subset_optimum,
)
from tests.transport.strategies import EDGES, A, few, laws, pairs

LP = 1e-9  # HiGHS is asked for 1e-10; its flow is then scaled into the feasible set


def lp(p, candidates):
    coupling = solve(TransportProblem(target=p, candidates=candidates))
    assert coupling.is_lossless
    # An optimal flow leaves no hits to its residual.
    assert coupling.acceptance == pytest.approx(coupling.accepted_mass, abs=LP)
    return coupling.acceptance


def check_all_drawings(p, q, width):
    found = []
    for make, optimum in (
        (CandidateLaw.iid, iid_optimum),
        (CandidateLaw.without_replacement, without_replacement_optimum),
    ):
        problem = TransportProblem(target=p, candidates=make(q, width))
        found.append(optimum(p, q, width).acceptance)
        assert found[-1] == pytest.approx(lp(p, problem.candidates), abs=LP)
        assert found[-1] == pytest.approx(subset_optimum(problem).acceptance, abs=1e-13)
    assert found[1] >= found[0] - 1e-13


@few
@given(pairs())
def test_iid_and_without_replacement(case):
    check_all_drawings(*case)


@pytest.mark.parametrize("name", EDGES)
def test_optimum_of_every_way_of_drawing_on_edge_cases(name):
    p, q, width = EDGES[name]
    check_all_drawings(p, q, min(width, 4))


@few
@given(pairs())
def test_greedy_and_mixed(case):
    p, q, width = case
    fixed, rest = greedy_proposal(q, width)
    if rest is None:
        candidates = CandidateLaw.deterministic(p.size, fixed)
    else:
        candidates = CandidateLaw.mixed(fixed, rest, 1)
        wider = CandidateLaw.mixed(fixed, rest, 2)
        assert mixed_optimum(p, fixed, rest, 2).acceptance == pytest.approx(lp(p, wider), abs=LP)
    found = greedy_optimum(p, q, width).acceptance
    assert found == pytest.approx(lp(p, candidates), abs=LP)
    assert found == pytest.approx(greedy_acceptance(p, q, width), abs=1e-14)


def several(n):
    return st.tuples(laws(n), st.lists(laws(n), min_size=1, max_size=3))


@few
@given(st.integers(2, 5).flatmap(several))
def test_optimum_of_different_draft_laws_is_the_linear_programs(case):
    p, draft_laws = case
    optimum = different_drafts_optimum(p, draft_laws)
    assert optimum.acceptance == pytest.approx(lp(p, CandidateLaw.independent(draft_laws)), abs=LP)


def joint(n):
    tuples, masses = st.lists(st.integers(0, n - 1), max_size=3).map(tuple), [1.0, 2.0, 0.5, 0.0]
    weights = st.dictionaries(tuples, st.sampled_from(masses), min_size=1, max_size=6)
    return st.tuples(laws(n), weights.filter(lambda some: any(some.values())))


@few
@given(st.integers(2, 4).flatmap(joint))
def test_any_joint_law(case):
    p, weights = case
    total = sum(weights.values())
    law = {candidate_ids: mass / total for candidate_ids, mass in weights.items()}
    problem = TransportProblem.from_joint_law(p, law)
    assert subset_optimum(problem).acceptance == pytest.approx(solve(problem).acceptance, abs=LP)


@few
@given(pairs())
def test_one_candidate_is_the_maximal_coupling(case):
    p, q, _ = case
    for optimum in (iid_optimum, without_replacement_optimum):
        found = optimum(p, q, 1).acceptance
        assert found == pytest.approx(speculative_sampling_acceptance(p, q), abs=1e-15)


@few
@given(pairs())
def test_acceptance_one_is_where_the_linear_program_accepts_always(case):
    p, q, width = case
    found = acceptance_one(p, q)
    best = lp(p, CandidateLaw.iid(q, width))
    if found.holds(width):
        assert best > 1.0 - LP
    else:
        inside = list(found.tokens)
        assert best <= 1.0 + p[inside].sum() - q[inside].sum() ** width + LP


WHOLE = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any)


@given(WHOLE, WHOLE)
@example([16, 0, 8, 1], [1, 0, 2, 1])  # p(H) = q(H)^2 at H = {3}
@example([3, 1, 0, 0], [1, 1, 0, 0])
def test_the_smallest_number_of_drafts_is_exact_in_rational_numbers(target, draft):
    p, q = ([Fraction(weight, sum(weights)) for weight in weights] for weights in (target, draft))
    subsets = [inside for size in range(5) for inside in itertools.combinations(range(4), size)]

    def always(width):
        return all(
            sum(p[i] for i in inside) >= sum(q[i] for i in inside) ** width for inside in subsets
        )

    found = acceptance_one(np.array(p, dtype=float), np.array(q, dtype=float))
    if found.num_drafts is None:
        assert any((p[i] == 0) != (q[i] == 0) for i in range(4))
    else:
        assert always(found.num_drafts)
        assert found.num_drafts == 1 or not always(found.num_drafts - 1)


def test_the_tightest_set_is_the_one_that_asks_for_most_drafts():
    found = acceptance_one(*A)
    assert (found.num_drafts, found.tokens) == (4, (1, 2))  # log 0.5 / log 0.8 = 3.11
    assert lp(A[0], CandidateLaw.iid(A[1], 3)) == pytest.approx(1 + 0.5 - 0.8**3, abs=LP)
    assert lp(A[0], CandidateLaw.iid(A[1], 4)) == pytest.approx(1.0, abs=LP)
    assert acceptance_one(A[0], A[0]).num_drafts == 1
    never = acceptance_one(np.array([0.5, 0.5, 0.0]), np.array([0.4, 0.4, 0.2]))
    assert (never.num_drafts, never.tokens) == (None, (2,))
    assert acceptance_one(np.array([0.5, 0.5, 0.0]), np.array([1.0, 0.0, 0.0])).num_drafts is None
    # The draft misses a little of one token: a set of mass 1 - 1e-13 that the target has with mass
    # 0.75.
    many = acceptance_one(np.array([0.75, 0.25]), np.array([1.0 - 1e-13, 1e-13])).num_drafts
    assert many == pytest.approx(2.877e12, rel=1e-3)


@few
@given(pairs(), st.sampled_from([0.0, 0.3, 0.999, 1.0]))
def test_sub_target_is_the_target_with_a_token_never_drafted(case, share):
    p, q, width = case
    extended, never = np.append(share * p, 1.0 - share), np.append(q, 0.0)
    direct = iid_optimum(share * p, q, width).acceptance
    assert direct == pytest.approx(lp(extended, CandidateLaw.iid(never, width)), abs=LP)


def test_more_candidates_never_hurt():
    for optimum in (iid_optimum, without_replacement_optimum, greedy_optimum):
        values = [optimum(*A, width).acceptance for width in range(1, 6)]
        assert values == sorted(values)


def test_the_optimum_refuses_bad_laws_and_widths():
    with pytest.raises(OptionError, match="at least one candidate"):
        iid_optimum(*A, 0)
    with pytest.raises(LawError, match="one vocabulary"):
        check_pair(A[0], np.array([0.5, 0.5]))
    uniform = np.full(21, 1.0 / 21.0)
    with pytest.raises(OptionError, match="21 draftable tokens"):
        different_drafts_optimum(uniform, [uniform, uniform])
    with pytest.raises(LawError, match="mass to fixed candidates \\[0\\]"):
        mixed_optimum(A[0], (0,), A[1], 1)
    with pytest.raises(LawError, match="too small for p/q"):
        iid_optimum(np.array([0.5, 0.5]), np.array([1.0, 5e-324]), 2)
