"""Bets against the claim that tokens come from their reference laws.

An *e-process* starts at 1 and has expectation at most 1 at every time if the claim holds, whatever happened before. It is the
wealth of a player who bets on the next token at fair odds. By Ville's inequality it ever reaches `1 / alpha` with probability
at most `alpha`. An audit may therefore look at it after every text and stop when it likes.

In maths p is the reference law of a token x given the text before it, and U its *probability integral transform*: the mass of
all more probable tokens plus a uniform share of p(x). If the claim holds, the U are independent and uniform in [0, 1].

Each bet multiplies its wealth by the ratio r(x) / p(x), where the law r is chosen before x is seen:

* *Tilts*: r(x) is proportional to p(x) exp(s f(x)), with strengths s on a grid. The score f names a kind of fault: a wrong
  temperature, the most probable token too often or too seldom, mass moved to tokens of ranks 2 to 4 or to the tail, texts that
  end too early or too late. The tilt of the most probable token is also played apart in three contexts: first tokens, and
  tokens after a likely or an unlikely token.
* *Neighbours*: a density 1 + s (2U' - 1)(2U - 1) of U given the previous token's U'.
* *Histogram*: the density of U, estimated from all earlier tokens.
* *Tokens*: r(x) is proportional to p(x) times the ratio of the observed to the expected count of x in all earlier texts.
* *Prefixes*: the law of the token after each of the first four prefixes of a prompt, estimated from earlier texts. It sees
  wrong joint laws of the first tokens, and texts that repeat each other.

Reference:
    Ramdas, Grunwald, Vovk, Shafer: Game-theoretic statistics and safe anytime-valid inference, 2023, arXiv 2210.01948.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.audit.token_law import END, TokenLaw

_GRID: Final = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
STRENGTHS: Final = np.array([*(-s for s in reversed(_GRID)), *_GRID])
_COUPLINGS: Final = np.array([-0.9, -0.5, -0.2, 0.2, 0.5, 0.9])
_FLATTEST: Final = 0.5  # a stronger negative power of a tiny mass would amplify its rounding
_NUM_BINS: Final = 16
_BIN_COUNTS: Final = np.array([64.0, 1024.0])  # prior counts of the histogram
_PREFIX_COUNTS: Final = np.array([10.0, 100.0, 1000.0])  # prior counts of the laws after prefixes
_TOKEN_COUNTS: Final = np.array([[30.0], [300.0]])  # prior counts of every token
_NUM_TOKENS: Final = 20  # most probable tokens of a law whose counts are compared
_RARE: Final = 0.05  # tokens of less mass share a category after a prefix
NUM_PREFIXES: Final = 4
"""Tokens of a text whose laws are learned per prefix."""

FAULTS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "temperature": ("flatter than the reference, as at a higher temperature", "sharper, as at a lower temperature"),
        "most probable": ("too few most probable tokens", "too many most probable tokens"),
        "ranks 2 to 4": ("too few tokens of ranks 2 to 4", "too many tokens of ranks 2 to 4"),
        "tail": ("too few improbable tokens", "too many improbable tokens"),
        "end": ("texts end too late", "texts end too early"),
        "first": ("first tokens: too few most probable ones", "first tokens: too many most probable ones"),
        "after likely": ("after a likely token: too few most probable ones", "after a likely token: too many of them"),
        "after unlikely": ("after an unlikely token: too few most probable ones", "after an unlikely token: too many of them"),
        "neighbours": ("neighbouring tokens depend on each other", "neighbouring tokens depend on each other"),
        "histogram": ("quantiles are not uniform", "quantiles are not uniform"),
        "tokens": ("some tokens are too frequent, others too rare", "some tokens are too frequent, others too rare"),
        "prefixes": ("wrong joint distribution of first tokens", "wrong joint distribution of first tokens"),
    }
)
"""What each bet found, by the sign of its strength."""

WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "temperature": 0.14,
        "most probable": 0.14,
        "ranks 2 to 4": 0.12,
        "tail": 0.08,
        "first": 0.06,
        "after likely": 0.06,
        "after unlikely": 0.06,
        "end": 0.06,
        "neighbours": 0.04,
        "histogram": 0.06,
        "tokens": 0.08,
        "prefixes": 0.10,
    }
)
"""Shares of the first stake. They sum to 1, so that the joint wealth is an e-process as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A token beside its reference law.

    Args:
        law: The law.
        place: Category of the token.
        quantile: Its U, with ties broken by a uniform number.
        factors: Gains of the tilts; see `log_factors`.
    """

    law: TokenLaw
    place: int
    quantile: float
    factors: Mapping[str, Float64[np.ndarray, " strengths"]]


def judged(law: TokenLaw, name: str, uniform: float) -> Judged:
    """Compare a token with its law.

    Args:
        law: The reference law.
        name: The token.
        uniform: A number in [0, 1), independent of the token.
    """
    place = law.place(name)
    quantile = float(law.masses[:place].sum() + uniform * law.masses[place]) / float(law.masses.sum())
    below_one = min(quantile, math.nextafter(1.0, 0.0))
    return Judged(law=law, place=place, quantile=below_one, factors=log_factors(law, place))


class Wealth:
    """The wealth of all bets. It is the only changing object of an audit's statistics."""

    def __init__(self) -> None:
        self._log: dict[str, np.ndarray] = {name: np.zeros(_num_options(name)) for name in WEIGHTS}
        self._bins = np.zeros(_NUM_BINS)
        self._prefixes: dict[tuple[str, ...], dict[int, int]] = {}
        self._numbers: dict[str, int] = {}
        self._counts = np.zeros((2, 256))  # observed and expected, by number of the token
        self.num_tokens = 0
        self.num_impossible = 0
        self.peak = 0.0

    @property
    def log_e(self) -> float:
        """Logarithm of the joint e-process; infinite after a token that its law excludes."""
        if self.num_impossible:
            return math.inf
        return float(np.logaddexp.reduce([math.log(WEIGHTS[name]) + value for name, value in self.by_bet().items()]))

    def by_bet(self) -> dict[str, float]:
        """Logarithm of each bet's own e-process."""
        return {name: float(np.logaddexp.reduce(logs)) - math.log(len(logs)) for name, logs in self._log.items()}

    def finding(self) -> str:
        """The fault that the richest bet names."""
        if self.num_impossible:
            return f"{self.num_impossible} tokens outside of the support of their distributions"
        values = self.by_bet()
        name = max(values, key=lambda one: values[one] + math.log(WEIGHTS[one]))
        half = len(self._log[name]) // 2
        return FAULTS[name][int(self._log[name].argmax() >= half)]

    def add(self, prompt: str, names: Sequence[str], tokens: Sequence[Judged | None]) -> None:
        """Bet on the tokens of one text.

        Args:
            prompt: Name of the prompt and its sampling rules.
            names: The tokens.
            tokens: The same tokens beside their laws; `None` where there is no law.
        """
        previous: Judged | None = None
        for position, token in enumerate(tokens):
            if token is not None:
                self.num_tokens += 1
                if token.law.masses[token.place] == 0.0:
                    self.num_impossible += 1
                else:
                    self._add(token, previous, is_first=position == 0)
                    if position < NUM_PREFIXES:
                        self._learn((prompt, *names[:position]), token)
            previous = token
        self.peak = max(self.peak, self.log_e)

    def _add(self, token: Judged, previous: Judged | None, *, is_first: bool) -> None:
        factors = token.factors
        for name, rows in factors.items():
            self._log[name] += rows
        if is_first:
            self._log["first"] += factors["most probable"]
        elif previous is not None:
            context = "after likely" if previous.place == 0 else "after unlikely"
            self._log[context] += factors["most probable"]
            product = (2.0 * previous.quantile - 1.0) * (2.0 * token.quantile - 1.0)
            self._log["neighbours"] += np.log1p(_COUPLINGS * product)
        self._reweigh(token)
        place = int(token.quantile * _NUM_BINS)
        count, total = self._bins[place], self._bins.sum()
        self._log["histogram"] += np.log((_BIN_COUNTS + _NUM_BINS * count) / (_BIN_COUNTS + total))
        self._bins[place] += 1

    def _reweigh(self, token: Judged) -> None:
        names, masses = token.law.names[:_NUM_TOKENS], token.law.masses[:_NUM_TOKENS]
        numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
        if len(self._numbers) > self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, len(self._numbers))))
        observed, expected = self._counts[:, numbers]
        ratios = (observed + _TOKEN_COUNTS) / (expected + _TOKEN_COUNTS)
        gained = ratios[:, token.place] if token.place < len(names) else 1.0
        self._log["tokens"] += np.log(gained / (1.0 + (ratios - 1.0) @ masses[: len(names)]))
        self._counts[1, numbers] += masses[: len(names)]
        if token.place < len(names):
            self._counts[0, numbers[token.place]] += 1.0

    def _learn(self, prefix: tuple[str, ...], token: Judged) -> None:
        masses = token.law.masses
        rare = masses < _RARE
        is_rare = bool(rare[token.place])
        mass = float(masses[rare].sum() if is_rare else masses[token.place])
        counts = self._prefixes.setdefault(prefix, {})
        key = -1 if is_rare else token.place
        count, total = counts.get(key, 0), counts.get(-2, 0)
        self._log["prefixes"] += np.log((_PREFIX_COUNTS * mass + count) / (_PREFIX_COUNTS + total) / mass)
        counts[key], counts[-2] = count + 1, total + 1


def log_factors(law: TokenLaw, place: int) -> dict[str, Float64[np.ndarray, " strengths"]]:
    """Logarithms of r(x) / p(x) of the tilts, for every strength.

    Args:
        law: The reference law.
        place: Category of the token.
    """
    masses = law.masses
    logs = np.log(np.where(masses > 0.0, masses, 1.0))
    strengths = np.maximum(STRENGTHS, -_FLATTEST)
    powers = np.exp(strengths[:, None] * logs) @ masses
    factors = {"temperature": strengths * logs[place] - np.log(powers)}
    end, size = law.places.get(END, len(masses)), len(masses)
    ranges = {"most probable": (0, 1), "ranks 2 to 4": (1, 4), "tail": (8, size), "end": (end, end + 1)}
    for name, (first, last) in ranges.items():
        mass = min(float(masses[first:last].sum()), 1.0)
        factors[name] = STRENGTHS * (first <= place < last) - np.log1p(mass * np.expm1(STRENGTHS))
    return factors


def _num_options(name: str) -> int:
    learned = {"neighbours": _COUPLINGS, "histogram": _BIN_COUNTS, "tokens": _TOKEN_COUNTS, "prefixes": _PREFIX_COUNTS}
    return len(learned.get(name, STRENGTHS))
