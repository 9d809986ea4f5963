"""P(all draws without replacement fall in a prefix): closed form, race and plain enumeration."""

import math

import numpy as np
import pytest

from monge.transport.candidates import CandidateLaw
from monge.transport.race import _pairs, _race, prefix_containment
from tests.transport.strategies import as_law


def enumerated(q, width):
    contained = np.zeros(q.size)
    for candidate_ids, prob in CandidateLaw.without_replacement(q, width):
        contained[max(candidate_ids) :] += prob
    return contained


LAWS = [
    as_law([1.0, 2.0, 3.0, 4.0, 5.0]),
    as_law([1.0] * 6),
    as_law([1e-12, 1.0, 1e-6, 3.0, 1e-3]),
    as_law([1.0, 1e-15, 1e-15, 1e-15]),
    as_law(np.exp(np.linspace(-40.0, 0.0, 6))),
]


@pytest.mark.parametrize("q", LAWS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_prefix_containment_is_that_of_enumeration(q, width):
    found = prefix_containment(q, width)
    np.testing.assert_allclose(found, enumerated(q, width), rtol=0, atol=1e-14)


@pytest.mark.parametrize("q", LAWS)
def test_race_equals_closed_form_for_two_draws(q):
    np.testing.assert_allclose(_race(q, 2), _pairs(q), rtol=0, atol=1e-14)


def test_support_smaller_than_the_number_of_draws():
    np.testing.assert_array_equal(prefix_containment(np.array([0.5, 0.5]), 5), [0.0, 1.0])
    np.testing.assert_array_equal(prefix_containment(np.ones(1), 2), [1.0])


def test_step_is_fine_enough(monkeypatch):
    q = as_law(np.arange(1.0, 30.0))
    coarse = prefix_containment(q, 8)
    monkeypatch.setattr("monge.transport.race.log_step", lambda _: 1.0 / 32.0)
    np.testing.assert_allclose(coarse, prefix_containment(q, 8), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("size", "width"), [(100, 40), (200, 64), (300, 128)])
def test_many_draws_from_equal_tokens(size, width):
    """Then h tokens hold all draws with probability C(h, K) / C(n, K)."""
    exact = [math.comb(count, width) / math.comb(size, width) for count in range(1, size + 1)]
    found = prefix_containment(np.full(size, 1.0 / size), width)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-13)
