"""Completion: every feasible flow is lossless, and acceptance counts residual tokens that hit a candidate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.core.errors import LawError
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.coupling import Coupling
from tests.transport.strategies import A, few, pairs

P, Q = A
PROBLEM = TransportProblem(target=P, candidates=CandidateLaw.iid(Q, 2))


@few
@given(pairs(), st.integers(0, 3))
def test_every_feasible_kernel_is_lossless(case, seed):
    p, q, width = case
    problem = TransportProblem(target=p, candidates=CandidateLaw.iid(q, width))
    members = problem.candidates.membership
    kernel = np.random.default_rng(seed).random(members.shape) * members
    kernel /= np.maximum(1.0, kernel.sum(axis=1, keepdims=True))
    masses = problem.candidates.probs @ kernel
    kernel *= np.divide(p, masses, out=np.ones_like(p), where=masses > p)
    coupling = Coupling.from_kernel(problem, kernel)
    assert coupling.is_lossless
    np.testing.assert_allclose(coupling.conditional_laws.sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(coupling.kernel, kernel, atol=1e-15)
    assert coupling.accepted_mass - 1e-15 <= coupling.acceptance <= 1.0 + 1e-12


def test_residual_tokens_that_hit_a_candidate_count():
    # Never accepts: the completion is sample and match.
    nothing = Coupling.from_kernel(PROBLEM, np.zeros((9, 3)))
    assert nothing.accepted_mass == 0.0
    assert nothing.acceptance == pytest.approx(0.483, abs=1e-15)
    assert nothing.is_lossless


def test_a_coupling_whose_target_is_emitted_has_no_rest():
    problem = TransportProblem(target=P, candidates=CandidateLaw.iid(P, 1))
    coupling = Coupling.from_kernel(problem, np.eye(3))
    assert coupling.acceptance == 1.0
    assert coupling.law_error == 0.0
    np.testing.assert_array_equal(coupling.residual_law, P)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda flow: flow[:, :2], "expected shape"),
        (lambda flow: flow - 1e-9, "non-negative"),
        (lambda flow: np.where(flow > 0, flow, np.nan), "non-negative"),
        (lambda flow: flow + 1e-9, "not among the candidates"),
        (lambda flow: 1.1 * flow, "tuple . carries"),
        (lambda flow: flow, "token 2 carries 0.5, more than its mass 0.2"),
    ],
)
def test_wrong_flows_raise(change, message):
    first = np.zeros((9, 3))
    for row, (candidate_ids, prob) in enumerate(PROBLEM.candidates):
        first[row, candidate_ids[0]] = prob
    with pytest.raises(LawError, match=message):
        Coupling(problem=PROBLEM, flow=change(first))
