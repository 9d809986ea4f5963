"""The report of an audit: as values, and as an HTML page without scripts."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jinja2 import Environment, StrictUndefined

from monge.audit.bets import JudgedText
from monge.audit.deterministic import FirstStages

Verdict = Literal["lossless", "not lossless", "could not be judged"]
EXIT: Final[dict[Verdict, int]] = {"lossless": 0, "not lossless": 1, "could not be judged": 2}
"""Exit status of each verdict."""

NUM_BINS: Final = 20
NUM_RANKS: Final = 8
_LARGEST: Final = 1e3  # shown in place of an infinite logarithm: JSON has no infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class SituationResult:
    """A situation: its texts, judged tokens and largest e-value.

    Args:
        log_e: Logarithm of the e-value.
        finding: The fault that the richest bet names, if this situation alone rejects.
    """

    name: str
    num_texts: int
    num_tokens: int
    log_e: float
    finding: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An audit.

    Args:
        verdict: The verdict.
        reason: Why, in a sentence.
        alpha: Largest probability of a false alarm.
        num_tokens: Judged tokens of all situations.
        log_e: Logarithm of the largest e-value; the audit rejects at `log(1 / alpha)`.
        smallest_deviation: Mean total variation that this many tokens show with probability 0.9.
        situations: Each situation.
        deterministic: The first stages, if they ran.
        quantiles: Counts of token quantiles in equal bins: uniform if the claim holds.
        ranks: Observed and expected counts of the most probable token, the second, and so on, and
            of all others.
        curve: Judged tokens and logarithm of the e-value, after some of the texts.
        notes: What else a reader should know.
    """

    verdict: Verdict
    reason: str
    alpha: float
    num_tokens: int = 0
    log_e: float = 0.0
    smallest_deviation: float = 1.0
    situations: tuple[SituationResult, ...] = ()
    deterministic: FirstStages | None = None
    quantiles: tuple[int, ...] = ()
    ranks: tuple[tuple[int, float], ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values. An infinite logarithm becomes 1000."""
        return _finite(asdict(self))


def page(report: Report, server: str, reference: str) -> str:
    """Return a report as a page, with the names of the audited server and of its reference."""
    bound = math.log(1.0 / report.alpha)
    curve = [(tokens, min(log_e, 2.0 * bound)) for tokens, log_e in report.curve]
    values = [log_e for _, log_e in curve]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(
        report=report,
        server=server,
        reference=reference,
        bound=bound,
        curve=curve,
        last=max(1, curve[-1][0]) if curve else 1,
        low=min([0.0, *values]),
        high=max([1.1 * bound, *values]),
        highest=1.1 * max([1, *report.quantiles]),
    )


class Tally:
    """Counts for the plots; see `Report`."""

    def __init__(self) -> None:
        self._quantiles = np.zeros(NUM_BINS, dtype=np.int64)
        self._observed, self._expected = np.zeros(NUM_RANKS + 1), np.zeros(NUM_RANKS + 1)

    def add(self, text: JudgedText) -> None:
        """Count the tokens of a text."""
        bins = (text.quantiles * NUM_BINS).astype(np.int64)
        self._quantiles += np.bincount(bins, minlength=NUM_BINS)
        self._observed += np.bincount(np.minimum(text.places, NUM_RANKS), minlength=NUM_RANKS + 1)
        first = text.masses[:, :NUM_RANKS].sum(axis=0)
        self._expected[: len(first)] += first
        self._expected[NUM_RANKS] += text.masses[:, NUM_RANKS:].sum()

    def figures(self) -> dict[str, Any]:
        """Return `quantiles` and `ranks`."""
        ranks = zip(self._observed.astype(int).tolist(), self._expected.tolist(), strict=True)
        return {"quantiles": tuple(self._quantiles.tolist()), "ranks": tuple(ranks)}


def _finite(value: Any) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return (
        math.copysign(_LARGEST, value) if isinstance(value, float) and math.isinf(value) else value
    )
