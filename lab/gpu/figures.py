"""Measured numbers beside their goals."""

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured number and its goal.

    Args:
        name: Name in tables.
        values: One for each repeat, at least one.
        unit: Unit of the values; empty for ratios and counts.
        goal: What the median must reach, or must not exceed; `None` for a number without a goal.
        is_least: Whether the goal is to be reached.
        detail: Further numbers of the same measurement, in words.
    """

    name: str
    values: tuple[float, ...]
    unit: str = ""
    goal: float | None = None
    is_least: bool = False
    detail: str = ""

    @property
    def loss(self) -> float:
        """Factor between the goal and the median: above 1 if the goal is missed, 0 without a goal."""
        if self.goal is None:
            return 0.0
        low, high = median(self.values), self.goal
        low, high = (low, high) if self.is_least else (high, low)
        return high / low if low else float("inf") if high else 0.0

    def cells(self) -> tuple[str, ...]:
        """Return a row of a table: name, median and range, goal, verdict, detail."""
        spread = f" ({min(self.values):.3g} to {max(self.values):.3g})" if self.values[1:] else ""
        goal = "" if self.goal is None else f"{'≥' if self.is_least else '≤'} {self.goal:g}"
        verdict = f"missed {self.loss:.2f}x" if self.loss > 1 else "met" if goal else ""
        measured = f"{median(self.values):.3g}{spread} {self.unit}".strip()
        return self.name, measured, goal, verdict, self.detail
