"""Laws that users give: read, and refused with a reason if they are wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from monge.core.errors import LawError, OptionError
from monge.transport.laws import check_law

Vector = Float64[np.ndarray, " vocab"]

MAX_CANDIDATES: Final = 32
"""Most candidates of one node: the race of draws without replacement is exact up to here."""


def read_law(field: str, text: str) -> Vector:
    """Read a law from the command line: numbers with commas, or `@file` (`.npy`, `.json`, or text with one number a line).

    Args:
        field: Name of the option, for messages.
        text: The user's text.

    Raises:
        OptionError: If the numbers cannot be read.
        LawError: If they are no law.
    """
    path = Path(text[1:])
    if not text.startswith("@"):
        values: Any = _numbers(field, text.split(","))
    elif path.suffix == ".json":
        values = read_document(path)
    elif path.suffix == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise OptionError(
                f"{field}: cannot read {str(path)!r} as a .npy array: {error}"
            ) from error
    else:
        values = _numbers(field, _read_text(path).replace(",", " ").split())
    return law_of(field, values)


def law_of(field: str, values: Any) -> Vector:  # noqa: ANN401 (whatever a file holds)
    """Return a checked law from plain numbers.

    Raises:
        LawError: If it is not one non-empty list of finite, non-negative numbers that sum to one.
    """
    try:
        masses = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LawError(f"{field}: expected a list of probabilities; got {values!r:.60}") from error
    if masses.ndim != 1:
        raise LawError(f"{field}: expected one list of probabilities; got shape {masses.shape}")
    return check_law(field, masses)


def check_lengths(num_target: int, num_draft: int) -> None:
    """Refuse laws over different vocabularies."""
    if num_target != num_draft:
        raise LawError(
            f"--target-probs has {num_target} entries, --draft-probs {num_draft}; both list the "
            "same tokens in the same order"
        )


def check_candidates(field: str, count: int) -> None:
    """Refuse a number of candidates out of range."""
    if not 1 <= count <= MAX_CANDIDATES:
        raise OptionError(f"{field} must lie in 1..{MAX_CANDIDATES}; got {count}")


def read_document(path: Path) -> Any:  # noqa: ANN401 (whatever a file holds)
    """Return the contents of a JSON file.

    Raises:
        OptionError: If it cannot be read.
    """
    text = _read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{path}: not JSON: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {str(path)!r}: {error}") from error


def _numbers(field: str, words: Sequence[str]) -> list[float]:
    numbers: list[float] = []
    for index, word in enumerate(words):
        try:
            numbers.append(float(word))
        except ValueError as error:
            raise OptionError(
                f"{field}: entry {index} is {word.strip()!r}, which is no number; write e.g. "
                "0.5,0.3,0.2, or @file"
            ) from error
    return numbers
