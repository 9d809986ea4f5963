"""Selection form: equal to the relaxed form at the optimum, lossless at every truncation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.core.errors import LawError, OptionError
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.canonical import Tournament, tournament, truncated_program
from monge.transport.linear_program import solve
from tests.transport.reference_forms import (
    canonical_coupling,
    different_drafts_optimum,
    selection_law,
    selection_of,
)
from tests.transport.strategies import A, few, laws, pairs, very_few

THREE_LAWS = st.integers(2, 5).flatmap(lambda n: st.tuples(laws(n), laws(n), laws(n)))


@few
@given(pairs())
def test_selection_form_equals_relaxed_form(case):
    p, q, width = case
    for candidates in (CandidateLaw.iid(q, width), CandidateLaw.without_replacement(q, width)):
        problem = TransportProblem(target=p, candidates=candidates)
        best = solve(problem)
        selection = selection_of(best)
        coupling = canonical_coupling(problem, selection)
        assert coupling.is_lossless
        assert coupling.acceptance == pytest.approx(best.acceptance, abs=1e-9)
        accepted = np.minimum(p, selection_law(problem, selection)).sum()
        assert coupling.accepted_mass == pytest.approx(accepted, abs=1e-14)


@few
@given(THREE_LAWS, st.sampled_from([1, 2, 3, 5]), st.sampled_from(["ranked", "first"]))
def test_a_truncated_program_is_lossless(case, num_leading, tail):
    p, q1, q2 = case
    pair = truncated_program(p, q1, q2, num_leading=num_leading, tail=tail)
    problem = TransportProblem.from_draft_laws(p, [q1, q2])
    selection = Tournament(rounds=(pair,)).selection(problem)
    selected = selection_law(problem, selection)
    np.testing.assert_allclose(selected, pair.winner_law, rtol=0, atol=1e-15)
    coupling = canonical_coupling(problem, selection)
    assert coupling.is_lossless
    optimum = different_drafts_optimum(p, [q1, q2]).acceptance
    assert coupling.acceptance <= optimum + 1e-12
    if num_leading >= np.count_nonzero(q1 + q2):
        assert coupling.acceptance == pytest.approx(optimum, abs=1e-9)


def test_more_leading_tokens_come_closer():
    rng = np.random.default_rng(3)
    p, q1, q2 = (rng.dirichlet(np.full(12, 0.5)) for _ in range(3))
    pairs = [truncated_program(p, q1, q2, num_leading=size) for size in (1, 3, 6, 12)]
    values = [np.minimum(p, pair.winner_law).sum() for pair in pairs]
    assert values[0] < values[-1]
    assert values[-1] == pytest.approx(different_drafts_optimum(p, [q1, q2]).acceptance, abs=1e-9)


@very_few
@given(THREE_LAWS, st.sampled_from([1, 3]))
def test_a_tournament_is_lossless(case, num_leading):
    p, q1, q2 = case
    draft_laws = [q1, q2, q1]
    rounds = tournament(p, draft_laws, num_leading=num_leading)
    problem = TransportProblem.from_draft_laws(p, draft_laws)
    selection = rounds.selection(problem)
    winner = rounds.rounds[-1].winner_law
    np.testing.assert_allclose(selection_law(problem, selection), winner, rtol=0, atol=1e-14)
    coupling = canonical_coupling(problem, selection)
    assert coupling.is_lossless
    assert coupling.acceptance <= different_drafts_optimum(p, draft_laws).acceptance + 1e-12


def test_tail_variants_differ_only_outside():
    p, q = A
    ranked = truncated_program(p, q, q, num_leading=1, tail="ranked")
    first = truncated_program(p, q, q, num_leading=1, tail="first")
    for pair in itertools.product(range(3), repeat=2):
        if ranked.order[0] in pair:
            assert ranked.first_prob(*pair) == first.first_prob(*pair)
    i, j = int(ranked.order[2]), int(ranked.order[1])
    assert (ranked.first_prob(i, j), first.first_prob(i, j)) == (0.0, 1.0)


def test_a_wrong_selection_law_would_not_be_lossless():
    p, q = A
    problem = TransportProblem(target=p, candidates=CandidateLaw.iid(q, 2))
    selection = selection_of(solve(problem))
    # A solver's x, off by its tolerance.
    x = selection_law(problem, selection) + np.array([1e-4, 0.0, -1e-4])
    output = problem.candidates.probs @ (selection * np.minimum(1.0, p / x))
    residual = np.maximum(p - x, 0.0)
    output += (1.0 - output.sum()) * residual / residual.sum()
    assert np.abs(output - p).max() > 1e-6
    assert canonical_coupling(problem, selection).law_error < 1e-15


def test_canonical_couplings_refuse_bad_problems():
    p, q = A
    problem = TransportProblem(target=p, candidates=CandidateLaw.iid(q, 2))
    with pytest.raises(LawError, match="every row must sum to one"):
        canonical_coupling(problem, 0.5 * selection_of(solve(problem)))
    with pytest.raises(LawError, match="without candidates"):
        selection_of(solve(TransportProblem.from_joint_law(p, {(): 1.0})))
    with pytest.raises(OptionError, match="num_leading must lie in"):
        truncated_program(p, q, q, num_leading=0)
    with pytest.raises(OptionError, match="two draft laws or more"):
        tournament(p, [q], num_leading=2)
