"""Ridge regression that learns one example at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ridge:
    """Weighted least squares with a ridge, by recursive updates.

    Args:
        coefficients: The solution so far, `[features]`.
        inverse: Inverse of `ridge * identity + sum of weight * x x'`, `[features][features]`.
    """

    coefficients: Vector
    inverse: tuple[Vector, ...]

    @classmethod
    def empty(cls, num_features: int, ridge: float, bias: float = 0.0) -> "Ridge":
        """Nothing seen yet.

        `bias` is the prediction where all features but the first, which is 1, are zero.
        """
        rows = range(num_features)
        return cls(
            tuple(bias if row == 0 else 0.0 for row in rows),
            tuple(tuple(1.0 / ridge if row == column else 0.0 for column in rows) for row in rows),
        )

    def update(self, features: Sequence[float], value: float, weight: float = 1.0) -> "Ridge":
        """The solution with one more example (Sherman and Morrison's formula)."""
        spread = self._spread(features)
        scale = 1.0 / (1.0 / weight + _dot(features, spread))
        error = value - self.predict(features)
        return Ridge(
            tuple(
                old + scale * error * step
                for old, step in zip(self.coefficients, spread, strict=True)
            ),
            tuple(
                tuple(old - scale * left * right for old, right in zip(row, spread, strict=True))
                for row, left in zip(self.inverse, spread, strict=True)
            ),
        )

    def predict(self, features: Sequence[float]) -> float:
        """The fitted value."""
        return _dot(features, self.coefficients)

    def width(self, features: Sequence[float]) -> float:
        """How little is known here: the root of `x' inverse x`."""
        return math.sqrt(max(0.0, _dot(features, self._spread(features))))

    def _spread(self, features: Sequence[float]) -> Vector:
        return tuple(_dot(row, features) for row in self.inverse)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(one * other for one, other in zip(left, right, strict=True))
