"""Instance A: p = (.5, .3, .2), q = (.2, .3, .5), every column of the published table to six digits."""

import numpy as np
import pytest

from monge.transport.bounds import greedy_optimum, iid_optimum, without_replacement_optimum
from monge.transport.candidates import CandidateLaw, TransportProblem
from monge.transport.closed_forms import (
    k_seq_acceptance,
    k_seq_constants,
    recursive_rejection_acceptance,
    recursive_rejection_without_replacement_acceptance,
)
from monge.transport.linear_program import solve
from tests.transport.reference_forms import (
    greedy_acceptance,
    rearrangement_coupling,
    sample_and_match_acceptance,
    subset_optimum,
)
from tests.transport.strategies import A

P, Q = A
IID = TransportProblem(target=P, candidates=CandidateLaw.iid(Q, 2))
WITHOUT_REPLACEMENT = TransportProblem(target=P, candidates=CandidateLaw.without_replacement(Q, 2))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (iid_optimum(P, Q, 2).acceptance, 0.860000),
        (iid_optimum(P, Q, 3).acceptance, 0.988000),
        (solve(IID).acceptance, 0.860000),
        (solve(TransportProblem(target=P, candidates=CandidateLaw.iid(Q, 3))).acceptance, 0.988000),
        (rearrangement_coupling(P, Q, 2).acceptance, 0.860000),
        (rearrangement_coupling(P, Q, 3).acceptance, 0.988000),
        (without_replacement_optimum(P, Q, 2).acceptance, 0.985714),
        (solve(WITHOUT_REPLACEMENT).acceptance, 0.985714),
        (subset_optimum(WITHOUT_REPLACEMENT).acceptance, 0.985714),
        (greedy_optimum(P, Q, 2).acceptance, 0.900000),
        (greedy_acceptance(P, Q, 2), 0.900000),
        (k_seq_acceptance(P, Q, 2), 0.791355),
        (k_seq_constants(P, Q, 2).rho, 1.456776),
        (recursive_rejection_acceptance(P, [Q, Q]), 0.760000),
        (recursive_rejection_without_replacement_acceptance(P, Q, 2), 0.820000),
        (sample_and_match_acceptance(IID), 0.483000),
    ],
)
def test_published_values_of_the_worked_example(value, expected):
    assert value == pytest.approx(expected, abs=5.1e-7)


def test_minimal_cut_is_the_two_tokens_of_low_ratio():
    assert set(iid_optimum(P, Q, 2).tokens) == {1, 2}


def test_accepted_masses_of_the_worked_example():
    masses = rearrangement_coupling(P, Q, 2).accepted_masses
    np.testing.assert_allclose(masses, [0.36, 0.30, 0.20], atol=1e-14)
