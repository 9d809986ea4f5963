"""The rearrangement coupling attains the optimum.

Exact accepted masses and uniform scores.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.acceptance.rearrangement import Rearrangement
from lab.acceptance.score_table import ScoreTable
from monge.core.errors import LawError
from monge.transport.bounds import iid_optimum, mixed_optimum
from monge.transport.linear_program import solve
from tests.transport.reference_forms import rearrangement_coupling, speculative_sampling_acceptance
from tests.transport.strategies import EDGES, A, as_law, few, pairs, very_few

EXACT = 1e-12


def check_attains_the_optimum(p, q, width):
    scores = Rearrangement.build(p, q, width)
    assert scores.alpha == pytest.approx(scores.accepted_masses.sum(), abs=EXACT)
    assert (scores.accepted_masses <= p + 1e-16).all()
    coupling = rearrangement_coupling(p, q, width)
    assert coupling.is_lossless
    np.testing.assert_allclose(coupling.accepted_masses, scores.accepted_masses, rtol=0, atol=EXACT)
    assert coupling.acceptance == pytest.approx(iid_optimum(p, q, width).acceptance, abs=EXACT)
    if len(coupling.problem.candidates.tuples) <= 125:
        assert coupling.acceptance == pytest.approx(solve(coupling.problem).acceptance, abs=1e-9)


def check_scores(p, q, width):
    """Pushing uniform positions through the map gives uniform scores, and every token its masses."""
    scores = Rearrangement.build(p, q, width)
    table = ScoreTable.build(scores)
    starts = np.cumsum(table.weights.sum(axis=1)) - table.weights.sum(axis=1)
    u = starts[:, None] + table.walked
    partner = scores.partners(u.ravel()).reshape(u.shape)
    for power in range(5):
        moments = (1.0 - table.swap) * u**power + table.swap * partner**power
        assert (table.weights * moments).sum() == pytest.approx(1.0 / (power + 1), abs=EXACT)
    for token in np.flatnonzero(q):
        owns, receives = (table.owners == token)[:, None], (table.partners == token)[:, None]
        length = (table.weights * (owns * (1.0 - table.swap) + receives * table.swap)).sum()
        assert length == pytest.approx(q[token], abs=EXACT)


@few
@given(pairs())
def test_attains_the_optimum(case):
    check_attains_the_optimum(*case)


@pytest.mark.parametrize("name", EDGES)
def test_the_rearrangement_attains_the_optimum_on_edge_cases(name):
    check_attains_the_optimum(*EDGES[name])
    check_scores(*EDGES[name])


@very_few
@given(pairs(max_tokens=6, max_width=5))
def test_scores_are_uniform(case):
    check_scores(*case)


@few
@given(
    pairs(max_tokens=8, max_width=6),
    st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=6, max_size=6),
)
def test_swaps_of_scores_balance(case, positions):
    scores = Rearrangement.build(*case)
    u = np.array(positions)
    partner = scores.partners(u)
    swap, back = scores.swap_probs(u, partner), scores.swap_probs(partner, u)
    here, there = scores.densities(u), scores.densities(partner)
    gain, other = scores.gains[scores.windows_of(u)], scores.gains[scores.windows_of(partner)]
    assert scores.heights(u).min() >= -1e-15
    moves = swap > 0.0
    # the token receives g, position by position
    received = (1.0 - swap) * here + swap * there
    np.testing.assert_allclose(received[moves], gain[moves], rtol=0, atol=EXACT)
    # away from the peaks and from zero height, where the map is well conditioned
    heights, heights_there = scores.heights(u), scores.heights(partner)
    good = moves & (np.minimum(abs(here - gain), abs(there - other)) > 1e-3) & (heights > 1e-9)
    np.testing.assert_allclose(heights_there[good], heights[good], rtol=0, atol=1e-14)
    np.testing.assert_allclose(scores.partners(partner)[good], u[good], rtol=0, atol=1e-11)
    # m(u) du = m(u') du', |dE| being equal
    masses = swap * abs(there - other), back * abs(here - gain)
    np.testing.assert_allclose(masses[0][good], masses[1][good], rtol=0, atol=1e-10)


@few
@given(pairs())
def test_one_candidate_is_speculative_sampling(case):
    p, q, _ = case
    coupling = rearrangement_coupling(p, q, 1)
    assert coupling.acceptance == pytest.approx(speculative_sampling_acceptance(p, q), abs=1e-14)
    for ((token,), _), row in zip(coupling.problem.candidates, coupling.kernel, strict=True):
        # a candidate too improbable for its window to have a length in float64 is refused
        assert row[token] == pytest.approx(min(1.0, p[token] / q[token]), abs=1e-6)


def test_score_of_a_candidate():
    scores = Rearrangement.build(*A, 2)
    assert scores.threshold == pytest.approx(1.0 - np.sqrt(0.14))
    for token, left, right in ((0, 0.0, 0.2), (1, 0.2, 0.5), (2, 0.5, 1.0)):
        for position in (0.0, 0.3, 0.999999):
            kept = scores.score(token, position, 1.0)
            assert kept == pytest.approx(left + position * (right - left))
            moved = scores.score(token, position, 0.0)
            assert moved in {kept, scores.partners(np.array([kept]))[0]}
    with pytest.raises(LawError, match="token 1 has no draft mass"):
        Rearrangement.build(A[0], np.array([0.5, 0.0, 0.5]), 2).score(1, 0.5, 0.5)


@very_few
@given(pairs(max_tokens=5, max_width=2), st.integers(0, 2))
def test_deterministic_candidates_and_draws(case, num_fixed):
    p, q, width = case
    fixed = tuple(np.argsort(-q, kind="stable")[:num_fixed].tolist())
    rest = q.copy()
    rest[list(fixed)] = 0.0
    if not rest.any():
        return
    rest = rest / rest.sum()
    coupling = rearrangement_coupling(p, rest, width, fixed)
    assert coupling.is_lossless
    optimum = mixed_optimum(p, fixed, rest, width).acceptance
    assert coupling.acceptance == pytest.approx(optimum, abs=EXACT)
    assert coupling.acceptance == pytest.approx(solve(coupling.problem).acceptance, abs=1e-9)


@very_few
@given(pairs(), st.sampled_from([0.2, 0.9]))
def test_a_target_of_less_mass_is_one_with_a_rest_token(case, share):
    p, q, width = case
    direct = Rearrangement.build(share * p, q, width)
    extended = rearrangement_coupling(np.append(share * p, 1.0 - share), np.append(q, 0.0), width)
    masses = direct.accepted_masses, extended.accepted_masses[:-1]
    np.testing.assert_allclose(*masses, rtol=0, atol=EXACT)


def test_larger_support_and_more_candidates():
    rng = np.random.default_rng(5)
    p, q = as_law(rng.gamma(0.3, size=12)), as_law(rng.gamma(0.5, size=12))
    check_scores(p, q, 6)
    built = rearrangement_coupling(p, q, 3), Rearrangement.build(p, q, 3)
    masses = [one.accepted_masses for one in built]
    np.testing.assert_allclose(*masses, rtol=0, atol=EXACT)
