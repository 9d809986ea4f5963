"""From a draft network's confidence to a probability of acceptance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.reliability import calibration_error
from monge.core.stopping import logit

Round = tuple[tuple[float, ...], int]
"""Scores (log odds of acceptance) of the drafted tokens, and how many of these were accepted."""

_KEEP: Final = 0.998  # weight that a round's evidence keeps with every later round
_NUM_ROUNDS: Final = 96  # rounds that the temperatures are fitted to
_REFIT: Final = 128  # rounds between two fits
_CLEAR: Final = 2.0  # gain of log-likelihood that a needless temperature reaches in one of twenty cases
_TEMPERATURES: Final = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A logistic law of acceptance given confidence, fitted online, with a temperature per depth.

    The law is fitted by online Newton steps on the depths that were reached. This is unbiased,
    because a plan stops only for reasons that the confidence explains. Temperatures are refitted
    from time to time.

    Args:
        bias: See `StopRule`.
        slope: See `StopRule`.
        curvature: Second derivatives of the log-likelihood: bias-bias, bias-slope, slope-slope.
        temperatures: See `StopRule`.
        pairs: Running sums of consecutive acceptances x, y in a round: weight, x, y, x squared, x y.
        recent: The last rounds.
        num_rounds: Rounds with confidences so far.
    """

    bias: float = 1.0
    slope: float = 0.5
    curvature: tuple[float, float, float] = (1.0, 0.0, 1.0)
    temperatures: tuple[float, ...] = ()
    pairs: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    recent: tuple[Round, ...] = ()
    num_rounds: int = 0

    @property
    def following(self) -> tuple[float, float] | None:
        """Intercept and slope of the regression of a depth's acceptance on the depth above.

        Means by depth would be a biased intercept: deeper levels are read only if those above
        looked good.
        """
        weight, x, y, xx, xy = self.pairs
        spread = weight * xx - x * x
        if weight <= 0.0 or spread <= 1e-9 * weight * xx:
            return None
        slope = min(1.0, max(0.0, (weight * xy - x * y) / spread))
        return (y - slope * x) / weight, slope

    def update(self, confidences: Sequence[float], num_accepted: int, num_decided: int) -> "Calibration":
        """Return the calibration after a round.

        Args:
            confidences: Of all drafted depths.
            num_accepted: Accepted tokens.
            num_decided: Depths that were reached.
        """
        if not confidences:
            return self
        xs = [logit(confidence) for confidence in confidences]
        (a, b, c), bias, slope = self.curvature, self.bias, self.slope
        a, b, c = _KEEP * a, _KEEP * b, _KEEP * c
        for depth, x in enumerate(xs[:num_decided]):
            prob = sigmoid(bias + slope * x)
            weight, error = max(prob * (1.0 - prob), 0.02), prob - (depth < num_accepted)
            a, b, c = a + weight, b + weight * x, c + weight * x * x
            scale = error / (a * c - b * b)
            bias -= scale * (c - b * x)
            slope -= scale * (a * x - b)
        scores = tuple(bias + slope * x for x in xs)
        recent = (*self.recent, (scores, num_accepted))[-_NUM_ROUNDS:]
        count = self.num_rounds + 1
        refit = count % _REFIT == 0
        temperatures = sequential_temperatures(recent) if refit else self.temperatures
        return Calibration(bias, slope, (a, b, c), temperatures, self._paired(scores[: num_accepted + 1]), recent, count)

    def _paired(self, scores: Sequence[float]) -> tuple[float, float, float, float, float]:
        weight, sx, sy, sxx, sxy = (_KEEP * value for value in self.pairs)
        shares = [sigmoid(score) for score in scores]
        for x, y in zip(shares, shares[1:], strict=False):
            weight, sx, sy, sxx, sxy = weight + 1.0, sx + x, sy + y, sxx + x * x, sxy + x * y
        return weight, sx, sy, sxx, sxy


def sequential_temperatures(rounds: Sequence[Round], grid: Sequence[float] = _TEMPERATURES) -> tuple[float, ...]:
    """Return temperatures by depth that calibrate the *survival*.

    With the depths above it fixed, each depth takes the temperature with the smallest expected
    calibration error of the cumulative product, over the rounds that drafted so deep. It must also
    raise the likelihood clearly, because with few rounds some temperature always has a small error
    by chance. Dividing log odds by one positive number per depth keeps the
    order of a depth's scores, and survivals still fall along a round.

    Args:
        rounds: Scores and accepted tokens.
        grid: Temperatures to choose from.

    Reference:
        Sequential temperature scaling of DSpark, arXiv 2607.05147.
    """
    reach = [1.0] * len(rounds)
    chosen: list[float] = []
    for depth in range(max((len(scores) for scores, _ in rounds), default=0)):
        rows = [index for index, (scores, _) in enumerate(rounds) if len(scores) > depth]
        labels = [rounds[index][1] > depth for index in rows]

        def survival(temperature: float, rows: Sequence[int] = rows, depth: int = depth) -> list[float]:
            return [reach[index] * sigmoid(rounds[index][0][depth] / temperature) for index in rows]

        survivals = {temperature: survival(temperature) for temperature in (1.0, *grid)}
        best = min(grid, key=lambda one: (calibration_error(survivals[one], labels), abs(math.log(one))))
        if log_likelihood(survivals[best], labels) < log_likelihood(survivals[1.0], labels) + _CLEAR:
            best = 1.0
        chosen.append(best)
        for index, value in zip(rows, survivals[best], strict=True):
            reach[index] = value
    return tuple(chosen)


def log_likelihood(probs: Sequence[float], labels: Sequence[bool]) -> float:
    """Return the log-likelihood of outcomes under these probabilities."""
    given = (prob if label else 1.0 - prob for prob, label in zip(probs, labels, strict=True))
    return sum(math.log(prob) if prob > 0.0 else -math.inf for prob in given)


def sigmoid(score: float) -> float:
    """Return the probability of log odds."""
    bounded = 30.0 if score > 30.0 else -30.0 if score < -30.0 else score
    return 1.0 / (1.0 + math.exp(-bounded))
