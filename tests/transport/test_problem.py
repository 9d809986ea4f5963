"""Problems from every kind of proposal, and what is refused."""

import numpy as np
import pytest
import torch

from monge.core.errors import LawError, OptionError
from monge.laws.law import DenseLaw, SparseLaw, one_hot
from monge.laws.proposal import (
    Arbitrary,
    Deterministic,
    Iid,
    Independent,
    Mixed,
    SharedClocks,
    WithoutReplacement,
)
from monge.transport.candidates import CandidateLaw, TransportProblem
from tests.transport.strategies import A

P, Q = A
BELOW, EVEN = np.array([1.5, -0.5]), np.array([0.5, 0.5])
DENSE = DenseLaw(torch.tensor(Q))
SPARSE = SparseLaw(torch.tensor([0, 2]), torch.tensor([0.25, 0.75], dtype=torch.float64))


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        (Deterministic((2, 0)), {(2, 0): 1.0}),
        (Deterministic(()), {(): 1.0}),
        (Iid(SPARSE, 2), {(0, 0): 0.0625, (0, 2): 0.1875, (2, 0): 0.1875, (2, 2): 0.5625}),
        (WithoutReplacement(SPARSE, 3), {(0, 2): 0.25, (2, 0): 0.75}),
        (WithoutReplacement(DENSE, 1), {(0,): 0.2, (1,): 0.3, (2,): 0.5}),
        (Mixed((1,), SPARSE, 1), {(1, 0): 0.25, (1, 2): 0.75}),
        (Independent((one_hot(1), SPARSE)), {(1, 0): 0.25, (1, 2): 0.75}),
        (SharedClocks(SPARSE), {(0,): 0.25, (2,): 0.75}),
    ],
)
def test_joint_law_of_each_proposal(proposal, expected):
    candidates = TransportProblem.from_proposal(P, proposal).candidates
    assert dict(candidates) == pytest.approx(expected, abs=1e-15)


def test_without_replacement_is_the_chain_of_conditional_laws():
    candidates = dict(CandidateLaw.without_replacement(Q, 2))
    assert candidates[0, 1] == pytest.approx(0.2 * 0.3 / 0.8)
    assert candidates[2, 0] == pytest.approx(0.5 * 0.2 / 0.5)
    assert len(candidates) == 6


def test_different_draft_laws():
    candidates = dict(TransportProblem.from_draft_laws(P, [Q, P]).candidates)
    assert candidates[0, 2] == pytest.approx(0.2 * 0.2)


def test_inclusion_probabilities_of_independent_candidates():
    np.testing.assert_allclose(CandidateLaw.iid(Q, 2).inclusion, 1.0 - (1.0 - Q) ** 2, atol=1e-15)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.array([0.5, 0.3, 0.1]), "target: masses must sum to 1; got 0.9"),
        (np.array([0.5, 0.7, -0.2]), "target: masses must be non-negative"),
        (np.array([0.5, 0.5, np.nan]), "target: masses must be non-negative"),
        (np.array([0.5, 0.5, np.inf]), "sum inf"),
        (np.array([0.5, 0.5]), "target over 2 tokens, candidates over 3"),
    ],
)
def test_bad_targets(target, message):
    with pytest.raises(LawError, match=message):
        TransportProblem(target=target, candidates=CandidateLaw.iid(Q, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CandidateLaw.iid(np.array([0.5, 0.4]), 2), "draft law 0: masses must sum to 1"),
        (lambda: CandidateLaw.without_replacement(BELOW, 2), "draft law: masses must be non-nega"),
        (
            lambda: CandidateLaw.explicit(3, {(0, 3): 1.0}),
            r"tokens \[3\] are outside a vocab.* of 3",
        ),
        (lambda: CandidateLaw.explicit(3, {(0, -1): 1.0}), r"tokens \[-1\] are outside"),
        (lambda: CandidateLaw.explicit(3, {(0,): 0.7}), "sum 0.7"),
        (lambda: CandidateLaw.explicit(3, {(0,): 1.5, (1,): -0.5}), "masses must be positive"),
        (lambda: CandidateLaw.explicit(3, {(0,): float("nan")}), "masses must be positive"),
        (lambda: CandidateLaw(num_tokens=3, tuples=((0,), (0,)), probs=EVEN), "listed twice"),
        (lambda: CandidateLaw(num_tokens=3, tuples=((0,),), probs=EVEN), "1 tuples but masses of "),
        (lambda: CandidateLaw.mixed((2,), Q, 1), r"mass to fixed candidates \[2\]"),
        (lambda: CandidateLaw.mixed((3,), Q, 1), r"fixed candidates \[3\] are outside"),
        (lambda: CandidateLaw.from_proposal(3, Arbitrary((0,))), "no declared law"),
        (lambda: CandidateLaw.from_proposal(2, Iid(SPARSE, 1)), "token 2 is outside a vocabulary"),
        (lambda: CandidateLaw.from_proposal(4, Iid(DENSE, 1)), "law over 3 tokens, target over 4"),
    ],
)
def test_bad_candidates(make, message):
    with pytest.raises(LawError, match=message):
        make()


def test_too_many_tuples():
    with pytest.raises(OptionError, match="1e\\+06 tuples"):
        CandidateLaw.iid(np.full(100, 0.01), 3)


def test_inputs_are_copied():
    mine = P.copy()
    problem = TransportProblem(target=mine, candidates=CandidateLaw.iid(Q, 1))
    mine[0] = 9.0
    np.testing.assert_array_equal(problem.target, P)
    with pytest.raises(ValueError, match="read-only"):
        problem.target[0] = 1.0
