"""Shared noise: the output law and the chance of a match, from the clocks themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from monge.core.errors import LawError, OptionError
from monge.transport.bounds import iid_optimum
from monge.transport.closed_forms import match_probability
from tests.kit.strategies import weight_pairs
from tests.transport.reference_forms import speculative_sampling_acceptance

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])


def law(weights: list[int]) -> np.ndarray:
    return np.array(weights) / sum(weights)


def integrated(p: np.ndarray, q: np.ndarray, width: int) -> tuple[np.ndarray, float]:
    """The output law and the chance of a match, by integration over the clock that decides, one survival at a time."""
    output, match = np.zeros(p.size), 0.0
    for j in np.flatnonzero(p):

        def wins(s: float, j: int = int(j)) -> float:
            """The output is j through its first clock, which rings at s.

            No clock of any draft rings before its share of s.
            """
            others = [i for k in range(width) for i in range(p.size) if (i, k) != (j, 0)]
            return float(np.exp(-s) * np.prod(np.exp(-s * p[others] / p[j])))

        def matches(s: float, j: int = int(j)) -> float:
            """And the first draft is j as well.

            Its other clocks do not ring before their share under q either.
            """
            if q[j] == 0.0:
                return 0.0
            earlier = [max(0.0, q[i] / q[j] - p[i] / p[j]) for i in range(p.size) if i != j]
            return wins(s, j) * float(np.exp(-s * sum(earlier)))

        output[j] = width * quad(wins, 0.0, np.inf)[0]
        match += width * quad(matches, 0.0, np.inf)[0]
    return output, match


@settings(max_examples=10)
@given(pair=weight_pairs(max_vocab=4), width=st.integers(1, 3))
def test_the_integrals_over_the_clocks(pair: tuple[list[int], list[int]], width: int) -> None:
    p, q = map(law, pair)
    output, match = integrated(p, q, width)
    np.testing.assert_allclose(output, p, atol=1e-9)
    assert match_probability(p, q, width) == pytest.approx(match, abs=1e-9)


@given(pair=weight_pairs(max_vocab=5), width=st.integers(1, 4))
def test_between_its_bounds(pair: tuple[list[int], list[int]], width: int) -> None:
    p, q = map(law, pair)
    found = match_probability(p, q, width)
    # The drafts are independent draws from q.
    assert found <= iid_optimum(p, q, width).acceptance + 1e-12
    if width == 1:
        kept = speculative_sampling_acceptance(p, q)
        assert kept / (2.0 - kept) - 1e-12 <= found <= kept + 1e-12


def test_equal_laws_match_with_one_draft_only() -> None:
    """With more drafts the output may come from a clock whose draft is another token."""
    assert match_probability(P, P, 1) == pytest.approx(1.0, abs=1e-15)
    assert match_probability(P, Q, 1) < match_probability(P, Q, 2)


def test_ratios_that_overflow() -> None:
    found = match_probability(np.array([1.0, 0.0]), np.array([1e-300, 1.0]), 1)
    assert found == pytest.approx(1e-300, rel=1e-12)


@pytest.mark.statistical
@pytest.mark.parametrize("width", [1, 2, 4])
def test_races_that_were_run(width: int) -> None:
    """Two hundred thousand races with a fixed seed.

    The frequencies lie within five standard errors.
    """
    races = 200_000
    clocks = np.random.default_rng(11).exponential(size=(races, width, 3))
    drafts = (clocks / Q).argmin(axis=2)
    output = (clocks.min(axis=1) / P).argmin(axis=1)
    deciding = clocks[np.arange(races), :, output].argmin(axis=1)
    matched = (drafts[np.arange(races), deciding] == output).mean()
    accepted = (drafts == output[:, None]).any(axis=1).mean()
    margin = 5.0 * np.sqrt(0.25 / races)
    np.testing.assert_allclose(np.bincount(output, minlength=3) / races, P, atol=margin)
    assert matched == pytest.approx(match_probability(P, Q, width), abs=margin)
    assert accepted >= matched
    assert accepted <= iid_optimum(P, Q, width).acceptance + margin


def test_match_probability_refuses_bad_laws() -> None:
    with pytest.raises(OptionError, match="at least one candidate; got 0"):
        match_probability(P, Q, 0)
    with pytest.raises(LawError, match="draft law: .* sum 1.5"):
        match_probability(P, np.array([0.5, 0.5, 0.5]), 1)
