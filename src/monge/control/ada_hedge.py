"""AdaHedge: weights over alternatives from their losses, without a learning rate to tune."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaHedge:
    """Exponential weights whose learning rate `ln N / D` follows from their own mixability gap D so far.

    For losses of range S and with `keep` 1 the expected loss exceeds that of the best alternative by at most
    `S (sqrt(T ln N) + 4/3 ln N + 2)` after T rounds, whatever the losses; where one alternative is better on average the excess
    stays bounded. Neither S nor T need be known.

    Args:
        losses: Sums of losses; old rounds count less.
        gap: Sum of the mixability gaps; old rounds count less.

    Reference:
        de Rooij, van Erven, Grünwald and Koolen, "Follow the leader if you can, hedge if you must", JMLR 15, 2014, Theorem 8.
    """

    losses: tuple[float, ...]
    gap: float = 0.0

    @property
    def weights(self) -> tuple[float, ...]:
        """The probability of each alternative; at first only the best ones have any."""
        least = min(self.losses)
        if self.gap <= 0.0:
            masses = [1.0 if loss == least else 0.0 for loss in self.losses]
        else:
            masses = [math.exp(-self._rate * (loss - least)) for loss in self.losses]
        total = math.fsum(masses)
        return tuple(mass / total for mass in masses)

    def update(self, losses: Sequence[float], keep: float | int = 1.0) -> "AdaHedge":
        """The weights after a round; earlier rounds count `keep` times as much as before."""
        weights, least = self.weights, min(losses)
        expected = math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        if self.gap <= 0.0:
            mixed = min(loss for weight, loss in zip(weights, losses, strict=True) if weight > 0.0)
        else:
            mass = math.fsum(
                weight * math.exp(-self._rate * (loss - least)) for weight, loss in zip(weights, losses, strict=True)
            )
            # Weights of alternatives far behind the best one underflow to zero.
            mixed = least - math.log(mass) / self._rate if mass > 0.0 else expected
        sums = tuple(keep * old + new for old, new in zip(self.losses, losses, strict=True))
        return AdaHedge(sums, keep * self.gap + max(0.0, expected - mixed))

    @property
    def _rate(self) -> float:
        return math.log(len(self.losses)) / self.gap
