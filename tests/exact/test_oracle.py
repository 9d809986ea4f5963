"""The oracle refuses what it cannot enumerate, instead of returning something."""

import itertools

import pytest

from monge.oracle.exact_law import OracleError, exact_law, law_error
from tests.kit.strategies import dense_law


def test_two_dice():
    die = dense_law([1, 1, 1])
    law = exact_law(lambda draws: draws.categorical(die) + draws.categorical(die))
    assert law_error(law, {0: 1 / 9, 1: 2 / 9, 2: 3 / 9, 3: 2 / 9, 4: 1 / 9}) < 1e-15


def test_branches_of_mass_zero_do_not_exist():
    def run(draws):
        return draws.bernoulli(0.0), draws.bernoulli(1.0), draws.categorical(dense_law([0, 1]))

    law = exact_law(run)
    assert law == {(False, True, 1): 1.0}


def test_a_probability_beyond_one_is_an_error():
    with pytest.raises(OracleError, match="is no probability"):
        exact_law(lambda draws: draws.bernoulli(1.0 + 1e-12))


def test_hidden_state_is_an_error():
    state = itertools.count()

    def run(draws):
        return draws.categorical(dense_law([1] * (2 + next(state)))), draws.bernoulli(0.5)

    with pytest.raises(OracleError, match="no function of its draws"):
        exact_law(run)


def test_too_many_branches_are_an_error():
    with pytest.raises(OracleError, match="more than 10 branches"):
        exact_law(lambda draws: [draws.bernoulli(0.5) for _ in range(5)] and 0, max_runs=10)


def test_positions_cannot_be_enumerated():
    with pytest.raises(OracleError, match="has no branches"):
        exact_law(lambda draws: draws.uniform())


def test_law_error_sees_missing_and_surplus_outcomes():
    assert law_error({"a": 1.0}, {"b": 1.0}) == 1.0
    assert law_error({"a": 0.9, "b": 0.1}, {"a": 1.0}) == pytest.approx(0.1)
