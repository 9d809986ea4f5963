"""Reference laws from log-probabilities, under sampling rules."""

import math

import numpy as np
import pytest

from monge.audit.token_law import MOST_NAMED, law_of_logprobs, shortened
from monge.core.sampling_rules import SamplingRules

PROBS = {"a": 0.5, "b": 0.25, "c": 0.125, "d": 0.0625}
TOP = {name: math.log(prob) for name, prob in PROBS.items()}


def test_unnamed_tokens_share_a_category():
    law = law_of_logprobs(TOP, SamplingRules())
    assert law is not None
    np.testing.assert_allclose(law.masses, [0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert (law.place("b"), law.place("z")) == (1, 4)


def test_top_k_at_a_temperature():
    law = law_of_logprobs(TOP, SamplingRules(temperature=0.5, top_k=2))
    assert law is not None
    np.testing.assert_allclose(law.masses, [0.8, 0.2, 0.0])


def test_top_p():
    law = law_of_logprobs(TOP, SamplingRules(top_p=0.8))
    assert law is not None
    np.testing.assert_allclose(law.masses, [4 / 7, 2 / 7, 1 / 7, 0.0])


@pytest.mark.parametrize(
    "rules",
    [
        SamplingRules(temperature=0.5),  # the mass of unnamed tokens at this temperature is unknown
        SamplingRules(top_p=0.751),  # noise may move the boundary
        SamplingRules(top_p=0.97),  # the boundary lies among unnamed tokens
    ],
    ids=str,
)
def test_unknown_laws_are_left_out(rules):
    assert law_of_logprobs(TOP, rules) is None


def test_a_tie_at_the_boundary_is_left_out():
    tied = {"a": math.log(0.4), "b": math.log(0.3), "c": math.log(0.2999)}
    assert law_of_logprobs(tied, SamplingRules(top_k=2)) is None


def test_at_most_some_tokens_are_named():
    law = shortened([str(i) for i in range(100)], np.full(100, 0.01), 0.0, is_truncated=False)
    assert len(law.names) == MOST_NAMED
    assert law.masses.sum() == pytest.approx(1.0)
