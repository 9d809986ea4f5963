"""Statistics of repeated measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import gmean, iqr

from monge.bench.resamples import Estimate, Resamples
from monge.core.errors import MongeError
from monge.laws.draws import SeededDraws

TAIL_TOKENS: Final = 24
MAX_PERIOD: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatSummary:
    """Repeated measurements of a number: median, smallest, largest, and quartile distance.

    The distance is 0 for fewer than two values. The values are in order of measurement.
    """

    median: float
    low: float
    high: float
    iqr: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "RepeatSummary":
        """Return the summary of at least one value."""
        if not values:
            raise MongeError("statistics: nothing was measured, so there is nothing to summarise")
        return cls(
            median=float(np.median(values)),
            low=min(values),
            high=max(values),
            iqr=float(iqr(values)),
            values=tuple(values),
        )


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, ...]:
    """Return the ratio within each repeat: what slows the machine for a while slows both sides of a pair."""
    if len(numerators) != len(denominators):
        raise MongeError(
            f"statistics: {len(numerators)} and {len(denominators)} repeats cannot be paired"
        )
    return tuple(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[int]
) -> Estimate:
    """Return the sum of some numbers over that of others, with an interval that resamples clusters.

    Args:
        numerators: At least one number.
        denominators: As many.
        clusters: The cluster of every pair, from 0.
    """
    resamples = Resamples.draw(max(clusters, default=0) + 1, SeededDraws(0))
    return resamples.ratio(np.array(numerators), np.array(denominators), np.array(clusters))


def geometric_mean(values: Sequence[float]) -> float:
    """Return `exp(mean(log(values)))`: the mean of ratios for which a ratio and its inverse cancel."""
    if not values or min(values) <= 0:
        raise MongeError(f"statistics: a geometric mean needs positive values; got {tuple(values)}")
    return float(gmean(values))


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """Return whether the last `TAIL_TOKENS` tokens repeat with a period of at most `MAX_PERIOD`.

    Looping text is easy to draft, so it flatters every drafter.
    """
    tail = tuple(token_ids[-TAIL_TOKENS:])
    is_short = len(tail) < TAIL_TOKENS
    return not is_short and any(
        tail[period:] == tail[:-period] for period in range(1, MAX_PERIOD + 1)
    )
