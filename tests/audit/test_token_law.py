"""Reference laws from log-probabilities, under sampling rules."""

import math

import numpy as np
import pytest

from monge.audit.token_law import MOST_NAMED, law_of_logprobs, truncated
from monge.core.sampling_rules import SamplingRules

PROBS = {"a": 0.5, "b": 0.25, "c": 0.125, "d": 0.0625}
TOP = {name: math.log(prob) for name, prob in PROBS.items()}


@pytest.mark.parametrize(
    ("rules", "masses"),
    [
        (SamplingRules(), [0.5, 0.25, 0.125, 0.0625, 0.0625]),  # the unnamed share a category
        (SamplingRules(temperature=0.5, top_k=2), [0.8, 0.2, 0.0]),
        (SamplingRules(top_p=0.8), [4 / 7, 2 / 7, 1 / 7, 0.0]),
    ],
    ids=str,
)
def test_sampling_rules_give_the_law_of_told_logprobs(rules, masses):
    law = law_of_logprobs(TOP, rules)
    assert law is not None
    np.testing.assert_allclose(law.masses, masses)
    assert (law.place("b"), law.place("z")) == (1, len(masses) - 1)


TIED = {"a": math.log(0.4), "b": math.log(0.3), "c": math.log(0.2999)}


@pytest.mark.parametrize(
    ("told", "rules"),
    [
        (TOP, SamplingRules(temperature=0.5)),  # the mass of unnamed tokens at it is unknown
        (TOP, SamplingRules(top_p=0.751)),  # noise may move the boundary
        (TOP, SamplingRules(top_p=0.97)),  # the boundary lies among unnamed tokens
        (TIED, SamplingRules(top_k=2)),
    ],
    ids=str,
)
def test_unknown_laws_are_left_out(told, rules):
    assert law_of_logprobs(told, rules) is None


def test_at_most_some_tokens_are_named():
    law = truncated([str(i) for i in range(100)], np.full(100, 0.01), 0.0, SamplingRules())
    assert law is not None
    assert len(law.names) == MOST_NAMED
    assert law.masses.sum() == pytest.approx(1.0)
