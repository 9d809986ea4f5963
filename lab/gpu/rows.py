"""Rows of the check, one after another within a budget of time; a row that fails does not stop the others."""

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine

_WHOLE_S: Final = 300.0
"""Seconds of a whole check, of which `Row.seconds` are parts."""
_LENGTH: Final = 300  # characters of a warning or an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A part of the check.

    Args:
        name: Name for `--rows`.
        measure: Takes the machine and the time, by `time.perf_counter`, at which it shall end.
        seconds: What it takes on a card at the largest size. It is not begun with less, or with less
            than this part of a smaller budget.
    """

    name: str
    measure: Callable[[Machine, float], Sequence[Figure]]
    seconds: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The figures of a row, or why there are none; and what it took and warned of."""

    row: str
    figures: Sequence[Figure] = ()
    seconds: float = 0.0
    missing: str | None = None
    warnings: list[str] = field(default_factory=list[str])


def run_rows(
    rows: Sequence[Row], machine: Machine, budget_s: float, say: Callable[[str], None]
) -> list[Outcome]:
    """Measure the rows in their order, as far as the time goes."""
    end, outcomes = time.perf_counter() + budget_s, list[Outcome]()
    for row in rows:
        left, outcome = end - time.perf_counter(), Outcome(row=row.name)
        outcomes.append(outcome)
        if left <= row.seconds * min(1.0, budget_s / _WHOLE_S):
            outcome.missing = f"not measured: {max(0.0, left):.0f} s of {budget_s:.0f} s were left"
            continue
        say(f"{row.name}: {left:.0f} s left")
        with warnings.catch_warnings(record=True) as told:
            # Among them is what runs eagerly where it should be compiled.
            warnings.simplefilter("always", UserWarning)
            try:
                outcome.figures = row.measure(machine, end)
            except Exception as error:  # noqa: BLE001 (whatever a machine that was never tried raises)
                outcome.missing = f"failed: {type(error).__name__}: {error}"[:_LENGTH]
        outcome.seconds = left - (end - time.perf_counter())
        found = (str(one.message)[:_LENGTH] for one in told if one.category is UserWarning)
        outcome.warnings = list(dict.fromkeys(found))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return outcomes
