"""Bets are fair, find what they are made for, and do not raise false alarms."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.audit.bets import BETS, Wealth, judged, log_factors, smallest_deviation
from monge.audit.token_law import END, SMALLEST_REST, TokenLaw

ALPHA = 0.001
LENGTH = 16
NUM_LAWS = 200
NUM_PROMPTS = 20


def random_laws(numbers: np.random.Generator, vocab: int = 20) -> list[TokenLaw]:
    names = tuple(str(token) for token in range(vocab))
    weights = np.sort(numbers.gamma(0.5, size=(NUM_LAWS, vocab)) + 1e-4)[:, ::-1]
    return [TokenLaw(names, row / row.sum(), SMALLEST_REST) for row in weights]


def more_of(probs: np.ndarray, ranks: slice, deviation: float) -> np.ndarray:
    """Move mass to some ranks, at the cost of the others in proportion."""
    moved = min(deviation, 0.9 * (1.0 - probs[ranks].sum()))
    inside = np.zeros(len(probs), dtype=bool)
    inside[ranks] = True
    mass = probs[ranks].sum()
    return np.where(inside, probs * (1 + moved / mass), probs * (1 - moved / (1 - mass)))


def sharper(probs: np.ndarray, deviation: float) -> np.ndarray:
    """Lower the temperature until the total variation is `deviation`."""
    low, high = 1.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        tempered = probs**middle / (probs**middle).sum()
        is_near = np.abs(tempered - probs).sum() / 2 < deviation
        low, high = (middle, high) if is_near else (low, middle)
    return probs**low / (probs**low).sum()


DEVIATIONS = {
    "most probable": lambda probs, size: more_of(probs, slice(0, 1), size),
    "ranks 2 to 4": lambda probs, size: more_of(probs, slice(1, 4), size),
    "sharper": sharper,
}


def audit(
    laws: Sequence[TokenLaw], drawn: Sequence[np.ndarray], num_tokens: int, seed: int
) -> Wealth:
    """Audit texts of a small Markov chain whose tokens come from `drawn`, up to a rejection."""
    numbers, wealth = np.random.default_rng(seed), Wealth()
    cumulative = [masses.cumsum() / masses.sum() for masses in drawn]
    while wealth.num_tokens < num_tokens and wealth.peak < math.log(1 / ALPHA):
        prompt, names, seen = int(numbers.integers(NUM_PROMPTS)), list[str](), list[TokenLaw]()
        for position in range(LENGTH):
            state = (7 * prompt + 13 * position + int(names[-1] if names else 0)) % len(laws)
            name = str(int(np.searchsorted(cumulative[state], numbers.random())))
            names.append(name)
            seen.append(laws[state])
        text = judged(seen, names, numbers.random(LENGTH).tolist())
        wealth.add(str(prompt), names, text, log_factors(text))
    return wealth


def is_rejected(wealth: Wealth) -> bool:
    return wealth.peak >= math.log(1 / ALPHA)


weights = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=80)
weights = weights.filter(lambda values: sum(values) > 0.01)


def law_of(values: list[float]) -> TokenLaw:
    masses = np.sort(np.array(values))[::-1]
    masses /= masses.sum()
    return TokenLaw((END, *map(str, range(len(masses) - 2))), masses[:-1], float(masses[-1]))


def add(wealth: Wealth, laws: Sequence[TokenLaw], names: Sequence[str], uniform: float) -> None:
    text = judged(laws, names, [uniform] * len(names))
    wealth.add("a prompt", names, text, log_factors(text))


@given(weights)
def test_a_bet_gains_nothing_on_average(values):
    law = law_of(values)
    every = [*law.names, "unnamed"]
    for name, gains in log_factors(judged([law] * len(every), every, [0.5] * len(every))).items():
        positive = law.masses > 0.0
        expected = law.masses[positive] @ np.exp(gains[positive])
        np.testing.assert_allclose(expected, 1.0, atol=1e-9, err_msg=name)


@given(weights, weights)
def test_a_bet_on_drafts_gains_nothing_on_average_whatever_the_draft_law(values, others):
    law = law_of(values)
    draft = np.resize(np.array(others) + 1e-3, law.masses.shape)
    law = replace(law, draft=draft / draft.sum())
    every = [*law.names, "unnamed"]
    scores = judged([law] * len(every), every, [0.5] * len(every)).scores
    assert np.abs(scores).max() <= 1.0
    assert law.masses @ scores == pytest.approx(0.0, abs=1e-12)


def test_learned_bets_gain_nothing_on_average():
    laws = random_laws(np.random.default_rng(0), vocab=6)[:1]
    names = ["0", "1", "0", "2", "0"]
    before = Wealth()
    for name in names:
        add(before, laws, [name], 0.3)
    expected = dict.fromkeys(("histogram", "prefixes", "tokens"), 0.0)
    steps = 400  # of the uniform number that breaks ties
    for place, mass in enumerate(laws[0].masses):
        for step in range(steps):
            after = Wealth()
            for name in names:
                add(after, laws, [name], 0.3)
            add(after, laws, [str(place)], (step + 0.5) / steps)
            gains = np.exp(after.values() - before.values())
            for bet in expected:
                expected[bet] += mass / steps * gains[tuple(BETS).index(bet)]
    assert expected["tokens"] == pytest.approx(1.0, abs=1e-6)
    assert expected["prefixes"] == pytest.approx(1.0, abs=1e-6)
    assert expected["histogram"] == pytest.approx(1.0, abs=2e-3)  # bins end between the steps


@given(weights, st.integers(0, 1000))
def test_quantiles_are_uniform(values, seed):
    law, numbers = law_of(values), np.random.default_rng(seed)
    places = np.searchsorted(law.masses.cumsum(), numbers.random(400) * law.masses.cumsum()[-1])
    names = [*law.names, "unnamed"]
    drawn = [names[min(place, len(names) - 1)] for place in places]
    quantiles = np.sort(judged([law] * 400, drawn, numbers.random(400).tolist()).quantiles)
    distance = np.abs(quantiles - (np.arange(400) + 0.5) / 400).max()
    assert distance < 0.17  # Kolmogorov-Smirnov at a level of 1e-10


def test_stakes_sum_to_one():
    assert math.fsum(share for share, *_ in BETS.values()) == pytest.approx(1.0, abs=1e-12)


def test_an_excluded_token_is_final():
    wealth = Wealth()
    law = TokenLaw(("a", "b"), np.array([0.5, 0.5]), 0.0)
    add(wealth, [law], ["c"], 0.5)
    assert wealth.log_e == math.inf
    assert "outside of the support" in wealth.finding()


def test_repeated_texts_are_found():
    laws, wealth = random_laws(np.random.default_rng(3)), Wealth()
    for _ in range(30):
        add(wealth, laws[:3], ["3", "5", "2"], 0.5)
    assert is_rejected(wealth)
    assert wealth.finding() == BETS["prefixes"][1]


def test_few_false_alarms():
    assert not num_alarms(256, 40)


def num_alarms(num_tokens: int, repeats: int) -> int:
    laws = random_laws(np.random.default_rng(1))
    drawn = [law.masses for law in laws]
    return sum(is_rejected(audit(laws, drawn, num_tokens, seed)) for seed in range(repeats))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_false_alarms_stay_below_alpha():
    assert num_alarms(512, 2000) <= 2000 * ALPHA


@pytest.mark.parametrize("kind", DEVIATIONS)
def test_deviations_are_found_and_named(kind):
    laws = random_laws(np.random.default_rng(1))
    wealth = audit(laws, [DEVIATIONS[kind](law.masses, 0.1) for law in laws], 4000, 0)
    assert is_rejected(wealth)
    words = {"most probable": "many most probable", "ranks 2 to 4": "many tokens of ranks 2 to 4"}
    assert words.get(kind, kind) in wealth.finding()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DEVIATIONS)
@pytest.mark.parametrize(
    ("num_tokens", "deviation", "repeats"), [(10_000, 0.03, 50), (100_000, 0.01, 20)]
)
def test_a_deviation_of_the_stated_size_is_found(kind, num_tokens, deviation, repeats):
    laws = random_laws(np.random.default_rng(1))
    drawn = [DEVIATIONS[kind](law.masses, deviation) for law in laws]
    found = sum(is_rejected(audit(laws, drawn, num_tokens, seed)) for seed in range(repeats))
    assert smallest_deviation(num_tokens, alpha=ALPHA) <= deviation
    # Of a power of at least 0.9: fewer have a probability below 2 % in 50 repeats.
    assert found >= 0.8 * repeats


def test_smallest_deviation_shrinks_with_the_budget():
    sizes = [smallest_deviation(count, alpha=ALPHA) for count in (0, 100, 10_000, 100_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 1.0
