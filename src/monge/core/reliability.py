"""Compares forecasts of acceptance with outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.verdict import StepRecord

_NUM_BINS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Forecast survival of drafted tokens against the outcomes.

    Args:
        num_forecasts: Drafted tokens with a forecast.
        calibration_error: See `calibration_error`.
        brier: Mean squared difference of forecast and outcome.
        bins: Of every tenth of the forecasts that occurs: mean forecast, share of accepted tokens, number of tokens.
    """

    num_forecasts: int
    calibration_error: float
    brier: float
    bins: tuple[tuple[float, float, int], ...]


def forecast_survival(record: StepRecord) -> tuple[float, ...]:
    """The chance, by depth, that the controller gave to a chain's tokens before they were drawn.

    The product of the stop rule's acceptances at the noted confidences; empty where the plan forecast nothing (it says no
    `expected` acceptance), or the draft was no chain, whose levels have no single path.
    """
    stop = record.plan.stop
    if stop is None or not stop.expected or record.num_nodes != record.depth:
        return ()
    survival: list[float] = []
    for depth, confidence in enumerate(record.confidences[: record.depth], start=1):
        survival.append((survival[-1] if survival else 1.0) * stop.acceptance(depth, confidence))
    return tuple(survival)


def reliability(records: Sequence[StepRecord]) -> Reliability | None:
    """Forecasts of all rounds together; `None` where there are none."""
    probs: list[float] = []
    labels: list[bool] = []
    for record in records:
        survival = forecast_survival(record)
        probs += survival
        labels += [record.num_accepted > depth for depth in range(len(survival))]
    if not probs:
        return None
    bins: list[tuple[float, float, int]] = []
    for number in range(_NUM_BINS):
        rows = [row for row, prob in enumerate(probs) if _bin(prob, _NUM_BINS) == number]
        if rows:
            mean, share = (sum(values[row] for row in rows) / len(rows) for values in (probs, labels))
            bins.append((mean, share, len(rows)))
    return Reliability(
        num_forecasts=len(probs),
        calibration_error=calibration_error(probs, labels),
        brier=sum((prob - label) ** 2 for prob, label in zip(probs, labels, strict=True)) / len(probs),
        bins=tuple(bins),
    )


def calibration_error(probs: Sequence[float], labels: Sequence[bool], num_bins: int = _NUM_BINS) -> float:
    """Expected calibration error: mean |sum of probabilities - number of events| over bins of equal width."""
    gaps = [0.0] * num_bins
    for prob, label in zip(probs, labels, strict=True):
        place = int(prob * num_bins)
        gaps[place if place < num_bins else num_bins - 1] += prob - label
    return sum(map(abs, gaps)) / len(probs) if probs else 0.0


def _bin(prob: float, num_bins: int) -> int:
    return min(int(prob * num_bins), num_bins - 1)
