"""Closed forms against enumeration."""

import numpy as np
import pytest
import torch

from monge.laws.law import DenseLaw
from monge.laws.proposal import WithoutReplacement
from monge.oracle.acceptance import accepted_masses, legal_schemes
from monge.oracle.schemes import closed_form, inclusion, optimum, sampling_schemes
from monge.transport.candidates import CandidateLaw
from monge.verify.registry import VERIFIERS

EXACT = 1e-12
LAWS = (([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.1, 0.0, 0.6, 0.3], [0.4, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_closed_forms_are_what_the_rules_do(p, q):
    p, q = np.array(p), np.array(q)
    target = DenseLaw(torch.from_numpy(p))
    ways = sampling_schemes(q, 2)
    compared = set()
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        for way, proposal in legal_schemes(rule, ways).items():
            value = closed_form(name, p, proposal)
            if value is None or not rule.is_enumerable:
                continue
            assert sum(accepted_masses(rule, target, proposal).values()) == pytest.approx(
                value, abs=EXACT
            ), (name, way)
            best = optimum(p, proposal)
            assert best is None or value <= best + EXACT, (name, way)
            compared.add(name)
    assert {
        "sample_and_match",
        "recursive_rejection",
        "recursive_rejection_without_replacement",
        "naive_tree",
        "k_seq",
        "greedy",
        "block",
    } <= compared


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_inclusion_of_draws_without_replacement(width):
    q = np.array([0.45, 0.3, 0.0, 0.15, 0.1])
    listed = CandidateLaw.without_replacement(q, width).inclusion
    found = inclusion(WithoutReplacement(DenseLaw(torch.from_numpy(q)), width), q.size)
    np.testing.assert_allclose(found, listed, atol=EXACT)
