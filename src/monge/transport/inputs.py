"""Laws that users give: read, and refused with a reason if they are wrong."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from monge.core.errors import LawError, OptionError
from monge.transport.laws import Vector, check_law

MAX_CANDIDATES: Final = 32
"""Most candidates of a node: the race of draws without replacement is exact up to here."""


def read_law(field: str, text: str) -> Vector:
    """Read a law from the command line: numbers with commas, or `@file` (`.npy`, `.json`, or lines of text).

    Args:
        field: Name of the option, for messages.
        text: The user's text.

    Raises:
        OptionError: If a file cannot be read.
        LawError: If the numbers are no law.
    """
    path = Path(text[1:])
    if not text.startswith("@"):
        return law_of(field, text.split(","))
    if path.suffix == ".json":
        return law_of(field, read_document(path))
    try:
        if path.suffix == ".npy":
            values: Any = np.load(path, allow_pickle=False)
        else:
            values = path.read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, EOFError, ValueError) as error:
        raise OptionError(f"{field}: cannot read {str(path)!r}: {error}") from error
    return law_of(field, values)


def law_of(field: str, values: Any) -> Vector:  # noqa: ANN401 (whatever a file holds)
    """Return a checked law from numbers, or from their texts.

    Raises:
        LawError: If it is not a non-empty list of finite, non-negative numbers that sum to 1.
    """
    try:
        masses = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LawError(f"{field}: no list of numbers, such as 0.5,0.3,0.2: {error}") from error
    if masses.ndim != 1:
        raise LawError(f"{field}: expected one list of probabilities; got shape {masses.shape}")
    return check_law(field, masses)


def check_candidates(field: str, count: object) -> None:
    """Refuse a number of candidates out of range."""
    if type(count) is not int or not 1 <= count <= MAX_CANDIDATES:
        raise OptionError(f"{field} must lie in 1..{MAX_CANDIDATES}; got {count!r}")


def read_document(path: Path) -> Any:  # noqa: ANN401 (whatever a file holds)
    """Return the contents of a JSON file.

    Raises:
        OptionError: If it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {str(path)!r} as JSON: {error}") from error
