"""Bets against the claim that tokens come from their reference laws.

An *e-process* starts at 1 and has expectation at most 1 at every time if the claim holds, whatever
happened before. It is the wealth of a player who bets on the next token at fair odds. By Ville's
inequality it ever reaches `1 / alpha` with probability at most `alpha`. An audit may therefore look
at it after every text and stop when it likes.

In maths p is the reference law of a token x given the text before it, and U its *probability
integral transform*: the mass of all more probable tokens plus a uniform share of p(x). If the claim
holds, the U are independent and uniform in [0, 1].

Each bet multiplies its wealth by the ratio r(x) / p(x), where the law r is chosen before x is seen:

* *Tilts*: r(x) is proportional to p(x) exp(s f(x)), with strengths s on a grid. The score f names a
  kind of fault: a wrong temperature, the most probable token too often or too seldom, mass moved to
  tokens of ranks 2 to 4 or to the tail, texts that end too early or too late. The tilt of the most
  probable token is also played apart in three contexts: first tokens, and tokens after a likely or
  an unlikely token.
* *Drafts*: 1 + s g, where g is the score of `TokenLaw`: mass moved from tokens that a draft model
  underrates to p itself, as where a draft is rejected or dropped and its place drawn from p. It
  needs the draft model's law, and plays nothing without it.
* *Neighbours*: a density 1 + s (2U' - 1)(2U - 1) of U given the previous token's U'.
* *Histogram*: the density of U, estimated from all earlier tokens.
* *Tokens*: r(x) is proportional to p(x) times the ratio of the observed to the expected count of x
  in all earlier texts.
* *Prefixes*: the law of the token after each of the first four prefixes of a prompt, estimated from
  earlier texts. It sees wrong joint laws of the first tokens, and texts that repeat each other.

Reference:
    Ramdas, Grunwald, Vovk, Shafer: Game-theoretic statistics and safe anytime-valid inference,
    2023, arXiv 2210.01948.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from scipy.stats import norm

from monge.audit.token_law import END, TokenLaw
from monge.core.words import counted

_GRID: Final = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
STRENGTHS: Final = np.array([*(-s for s in reversed(_GRID)), *_GRID])
_COUPLINGS: Final = np.array([-0.9, -0.5, -0.2, 0.2, 0.5, 0.9])  # with numbers from -1 to 1
_FLATTEST: Final = 0.5  # a stronger negative power of a tiny mass would amplify its rounding
_NUM_BINS: Final = 16
_BIN_COUNTS: Final = np.array([64.0, 1024.0])  # prior counts of the histogram
_PREFIX_COUNTS: Final = np.array([10.0, 100.0, 1000.0])  # prior counts of the laws after prefixes
_TOKEN_COUNTS: Final = np.array([30.0, 300.0])[:, None, None]  # prior counts of every token
_NUM_TOKENS: Final = 20  # most probable tokens of a law whose counts are compared
_TAIL: Final = 8  # most probable tokens that do not belong to the tail
_RARE: Final = 0.05  # tokens of less mass share a category after a prefix
_RARE_KEY, _TOTAL_KEY = -1, -2  # beside the categories of a law
_STAKE: Final = 3.4
"""Nats that the division of the first stake over bets and strengths costs the winning bet.

Measured, rounded up.
"""
NUM_PREFIXES: Final = 4
"""Tokens of a text whose laws are learned per prefix."""

BETS: Final[Mapping[str, tuple[float, str, str, str]]] = MappingProxyType(
    {
        "temperature": (
            0.14,
            "{} temperature",
            "flatter than the reference, as at a higher",
            "sharper, as at a lower",
        ),
        "most probable": (0.14, "too {} most probable tokens", "few", "many"),
        "ranks 2 to 4": (0.12, "too {} tokens of ranks 2 to 4", "few", "many"),
        "tail": (0.06, "too {} improbable tokens", "few", "many"),
        "first": (0.05, "first tokens: too {} most probable ones", "few", "many"),
        "after likely": (0.06, "after a likely token: too {} most probable ones", "few", "many"),
        "after unlikely": (
            0.06,
            "after an unlikely token: too {} most probable ones",
            "few",
            "many",
        ),
        "end": (0.05, "texts end too {}", "late", "early"),
        "drafts": (0.06, "too {} tokens that the draft model underrates", "many", "few"),
        "neighbours": (0.04, "neighbouring tokens depend on each other", "", ""),
        "histogram": (0.06, "quantiles are not uniform", "", ""),
        "tokens": (0.08, "some tokens are too frequent, others too rare", "", ""),
        "prefixes": (0.08, "wrong joint distribution of first tokens", "", ""),
    }
)
"""Share of the first stake of each bet, and its finding, with a word for negative and for positive strengths.

The shares sum to 1, so that the joint wealth is an e-process as well.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedText:
    """The tokens of a text that have a reference law, beside these laws.

    Args:
        positions: Places of these tokens in the text.
        laws: Their laws.
        places: Their categories.
        masses: The laws' masses, filled up with zeros.
        quantiles: Their U, with ties broken by uniform numbers.
        scores: Their scores beside a draft model; see `TokenLaw`.
    """

    positions: Int64[np.ndarray, " tokens"]
    laws: tuple[TokenLaw, ...]
    places: Int64[np.ndarray, " tokens"]
    masses: Float64[np.ndarray, "tokens categories"]
    quantiles: Float64[np.ndarray, " tokens"]
    scores: Float64[np.ndarray, " tokens"]

    @property
    def probs(self) -> Float64[np.ndarray, " tokens"]:
        """Return the mass of each token."""
        return self.masses[np.arange(len(self.places)), self.places]


def judged(
    laws: Sequence[TokenLaw | None], names: Sequence[str], uniforms: Sequence[float]
) -> JudgedText:
    """Compare tokens with their laws.

    Args:
        laws: The reference laws; `None`, or no entry at the end, where a law is unknown.
        names: The tokens.
        uniforms: Numbers in [0, 1), independent of the tokens.
    """
    known = [(position, law) for position, law in enumerate(laws) if law is not None]
    masses = np.zeros((len(known), max((len(law.masses) for _, law in known), default=1)))
    for row, (_, law) in zip(masses, known, strict=True):
        row[: len(law.masses)] = law.masses
    positions = np.array([position for position, _ in known], dtype=np.int64)
    places = np.array([law.place(names[position]) for position, law in known], dtype=np.int64)
    rows, cumulative = np.arange(len(known)), masses.cumsum(axis=1)
    shares = np.array([uniforms[position] for position in positions])
    quantiles = (cumulative[rows, places] - (1.0 - shares) * masses[rows, places]) / cumulative[
        :, -1
    ]
    return JudgedText(
        positions=positions,
        laws=tuple(law for _, law in known),
        places=places,
        masses=masses,
        quantiles=np.clip(quantiles, 0.0, math.nextafter(1.0, 0.0)),
        scores=np.array([law.score(names[position]) for position, law in known]),
    )


class Wealth:
    """The wealth of all bets. It is the only changing object of an audit's statistics."""

    def __init__(self) -> None:
        self._logs = np.full((len(BETS), len(STRENGTHS)), -np.inf)
        self._log = {
            name: row[: _num_options(name)] for name, row in zip(BETS, self._logs, strict=True)
        }
        for row in self._log.values():
            row[:] = 0.0
        self._bins = np.zeros(_NUM_BINS)
        self._prefixes: dict[tuple[str, ...], dict[int, int]] = {}
        self._numbers: dict[str, int] = {}
        self._counts = np.zeros((2, 256))  # observed and expected, by number of the token
        self.num_texts = self.num_tokens = self.num_impossible = 0
        self.log_e = 0.0
        """Logarithm of the joint e-process; infinite after a token that its law excludes."""
        self.peak = 0.0

    def values(self) -> Float64[np.ndarray, " bets"]:
        """Return the logarithm of each bet's own e-process, in the order of `BETS`."""
        return np.logaddexp.reduce(self._logs, axis=1) - _LOG_OPTIONS

    def finding(self) -> str:
        """Return the fault that the richest bet names."""
        if self.num_impossible:
            return f"{counted(self.num_impossible, 'token')} outside of the support of their distributions"
        name = tuple(BETS)[int((self.values() + _LOG_SHARES).argmax())]
        _, finding, negative, positive = BETS[name]
        is_positive = self._log[name].argmax() >= len(self._log[name]) // 2
        return finding.format(positive if is_positive else negative)

    def add(
        self, prompt: str, names: Sequence[str], text: JudgedText, factors: Mapping[str, np.ndarray]
    ) -> None:
        """Bet on the tokens of a text by what was learned before it.

        Args:
            prompt: Name of the prompt and its sampling rules.
            names: All tokens of the text.
            text: The tokens that have a law.
            factors: Gains of the tilts on these; see `log_factors`.
        """
        self.num_texts += 1
        self.num_tokens += len(text.laws)
        self.num_impossible += int((text.probs == 0.0).sum())
        if text.laws and not self.num_impossible:
            for name, rows in factors.items():
                self._log[name] += rows.sum(axis=0)
            self._bet_in_context(text, factors["most probable"])
            self._bet_on_quantiles(text)
            self._bet_on_counts(text)
            self._bet_on_prefixes(prompt, names, text)
        if self.num_impossible:
            self.log_e = math.inf
        else:
            self.log_e = float(np.logaddexp.reduce(_LOG_SHARES + self.values()))
        self.peak = max(self.peak, self.log_e)

    def _bet_in_context(self, text: JudgedText, factors: np.ndarray) -> None:
        self._log["first"] += factors[text.positions == 0].sum(axis=0)
        follows = np.append(False, np.diff(text.positions) == 1)
        was_likely = np.append(False, text.places[:-1] == 0)
        self._log["after likely"] += factors[follows & was_likely].sum(axis=0)
        self._log["after unlikely"] += factors[follows & ~was_likely].sum(axis=0)
        self._log["drafts"] += np.log1p(_COUPLINGS * text.scores[:, None]).sum(axis=0)
        centred = 2.0 * text.quantiles - 1.0
        products = (centred[1:] * centred[:-1])[follows[1:]]
        self._log["neighbours"] += np.log1p(_COUPLINGS * products[:, None]).sum(axis=0)

    def _bet_on_quantiles(self, text: JudgedText) -> None:
        places = (text.quantiles * _NUM_BINS).astype(np.int64)
        densities = (_BIN_COUNTS + _NUM_BINS * self._bins[places, None]) / (
            _BIN_COUNTS + self._bins.sum()
        )
        self._log["histogram"] += np.log(densities).sum(axis=0)
        self._bins += np.bincount(places, minlength=_NUM_BINS)

    def _bet_on_counts(self, text: JudgedText) -> None:
        # 0 for no token
        numbers = np.zeros((len(text.laws), min(_NUM_TOKENS, text.masses.shape[1])), dtype=np.int64)
        for row, law in zip(numbers, text.laws, strict=True):
            shown = law.names[: len(row)]
            row[: len(shown)] = [
                self._numbers.setdefault(name, len(self._numbers) + 1) for name in shown
            ]
        if len(self._numbers) >= self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, len(self._numbers))))
        masses = np.where(numbers > 0, text.masses[:, : numbers.shape[1]], 0.0)
        observed, expected = self._counts[:, numbers]  # [tokens, names]
        ratios = (observed + _TOKEN_COUNTS) / (
            expected + _TOKEN_COUNTS
        )  # [prior counts, tokens, names]
        rows = np.flatnonzero(text.places < numbers.shape[1])
        drawn = numbers[rows, text.places[rows]]
        totals = 1.0 + ((ratios - 1.0) * masses).sum(axis=-1)
        self._log["tokens"] += np.log(ratios[:, rows, text.places[rows]]).sum(axis=1) - np.log(
            totals
        ).sum(axis=1)
        np.add.at(self._counts[1], numbers.ravel(), masses.ravel())
        np.add.at(self._counts[0], drawn, 1.0)
        self._counts[:, 0] = 0.0

    def _bet_on_prefixes(self, prompt: str, names: Sequence[str], text: JudgedText) -> None:
        for index in range(int((text.positions < NUM_PREFIXES).sum())):
            masses, place = text.masses[index], int(text.places[index])
            counts = self._prefixes.setdefault((prompt, *names[: text.positions[index]]), {})
            rare = masses < _RARE
            key = _RARE_KEY if rare[place] else place
            mass = float(masses[rare].sum() if rare[place] else masses[place])
            count, total = counts.get(key, 0), counts.get(_TOTAL_KEY, 0)
            self._log["prefixes"] += np.log(
                (_PREFIX_COUNTS * mass + count) / (_PREFIX_COUNTS + total) / mass
            )
            counts[key], counts[_TOTAL_KEY] = count + 1, total + 1


def log_factors(text: JudgedText) -> dict[str, Float64[np.ndarray, "tokens strengths"]]:
    """Return the logarithms of r(x) / p(x) of the tilts, for every token and strength."""
    masses, size = text.masses, text.masses.shape[1]
    rows = np.arange(len(text.laws))
    logs = np.log(np.where(masses > 0.0, masses, 1.0))
    strengths = np.maximum(STRENGTHS, -_FLATTEST)
    powers = np.einsum("stc,tc->ts", np.exp(strengths[:, None, None] * logs), masses)
    factors = {"temperature": strengths * logs[rows, text.places][:, None] - np.log(powers)}
    ends = np.array([law.places.get(END, size) for law in text.laws], dtype=np.int64)
    columns = np.arange(size)
    sets = {
        "most probable": np.broadcast_to(columns == 0, masses.shape),
        "ranks 2 to 4": np.broadcast_to((columns >= 1) & (columns < 4), masses.shape),
        "tail": np.broadcast_to(columns >= _TAIL, masses.shape),
        "end": columns == ends[:, None],
    }
    for name, members in sets.items():
        mass = np.minimum((masses * members).sum(axis=1), 1.0)
        inside = members[rows, text.places]
        factors[name] = STRENGTHS * inside[:, None] - np.log1p(mass[:, None] * np.expm1(STRENGTHS))
    return factors


_OPTIONS: Final = {
    "drafts": _COUPLINGS,
    "neighbours": _COUPLINGS,
    "histogram": _BIN_COUNTS,
    "tokens": _TOKEN_COUNTS,
    "prefixes": _PREFIX_COUNTS,
}


def _num_options(name: str) -> int:
    return len(_OPTIONS.get(name, STRENGTHS))


_LOG_SHARES: Final = np.log([share for share, *_ in BETS.values()])
_LOG_OPTIONS: Final = np.log([_num_options(name) for name in BETS])


def smallest_deviation(num_tokens: int, *, alpha: float, power: float = 0.9) -> float:
    """Return the smallest mean total variation that an audit of so many tokens finds with probability `power`.

    It holds for deviations that any of the bets describes. The bound is that of the hardest
    deviation, which moves mass between two halves of equal mass: its wealth grows by 2 d^2 nats a
    token at total variation d, with a standard deviation of 2 d.

    Args:
        num_tokens: Judged tokens.
        alpha: Largest probability of a false alarm.
        power: Probability of finding it.
    """
    if num_tokens == 0:
        return 1.0
    # n K - z sqrt(2 n K) = log(1 / alpha) + stake, solved for the root of n K, where K = 2 d^2.
    z, needed = float(norm.ppf(power)), math.log(1.0 / alpha) + _STAKE
    root = (z * math.sqrt(2.0) + math.sqrt(2.0 * z * z + 4.0 * needed)) / 2.0
    return min(1.0, root / math.sqrt(2.0 * num_tokens))
