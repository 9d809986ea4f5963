"""Simulated audits: texts of a small Markov chain with random laws, judged against these laws."""

import math
from collections.abc import Sequence

import numpy as np

from monge.audit.bets import Wealth, judged, log_factors
from monge.audit.token_law import SMALLEST_REST, TokenLaw

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
        low, high = (
            (middle, high) if np.abs(tempered - probs).sum() / 2 < deviation else (low, middle)
        )
    return probs**low / (probs**low).sum()


DEVIATIONS = {
    "most probable": lambda probs, size: more_of(probs, slice(0, 1), size),
    "ranks 2 to 4": lambda probs, size: more_of(probs, slice(1, 4), size),
    "sharper": sharper,
}


def audit(
    laws: Sequence[TokenLaw], drawn: Sequence[np.ndarray], num_tokens: int, seed: int
) -> Wealth:
    """One audit, up to a rejection or `num_tokens`.

    Args:
        laws: Reference laws.
        drawn: Masses that tokens really come from, law by law.
        num_tokens: Budget.
        seed: Of the texts.
    """
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
