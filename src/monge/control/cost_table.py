"""Tables of seconds by batch size and by a number of tokens or levels, that follow what is measured."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final

from monge.core.errors import OptionError

OWN_RATE: Final = 0.12
"""Share of a log-ratio measured / predicted that the observed entry takes over: what is wrong is half mended in six rounds."""
_KIN_RATE: Final = 0.11
"""Share that entries of the same batch size and other sizes above 0 take over: a round says more about the moment, which all of
them share, than about the difference of two sizes, which decides how deep to draft."""
_DRIFT_RATE: Final = 0.04
"""Share that all other entries take over, plain rounds' among them where a draft was met."""
_LARGEST_RATIO: Final = 0.4
"""Largest log-ratio that one round may show: a round during which the machine was busy elsewhere is no news about its cost."""

Table = Mapping[int, Mapping[int, float]]
"""Seconds by batch size and by a number of tokens or levels."""


def checked(name: str, table: Table, *, may_be_zero: bool) -> dict[int, dict[int, float]]:
    """A copy whose entries can be changed, in order.

    Args:
        name: What it is, for messages.
        table: Times by batch size and by a number of tokens or levels.
        may_be_zero: Whether a time of zero is one.

    Raises:
        OptionError: If there is no entry, or one is no such time.
    """
    if not table or not all(table.values()):
        raise OptionError(f"costs: {name} is empty; measure at least one batch size and one number of nodes")
    for batch, row in table.items():
        for size, seconds in row.items():
            good = math.isfinite(seconds) and (seconds > 0.0 or (may_be_zero and seconds == 0.0))
            if not good or batch < 1 or size < 0:
                raise OptionError(
                    f"costs: {name}[{batch}][{size}] must be a {'' if may_be_zero else 'positive '}number of seconds; "
                    f"got {seconds}"
                )
    return {batch: dict(sorted(row.items())) for batch, row in sorted(table.items())}


def written(table: Table) -> dict[str, dict[str, float]]:
    """A table in plain values, for JSON."""
    return {str(batch): {str(size): seconds for size, seconds in row.items()} for batch, row in table.items()}


def read(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """The inverse of `written`."""
    return {int(batch): {int(size): float(seconds) for size, seconds in row.items()} for batch, row in rows.items()}


def row_of(table: Mapping[int, Mapping[int, float]], batch: int, sizes: Sequence[int]) -> list[float]:
    """Entries of one batch size, interpolated, for sizes that rise: `interpolated` for each, in one walk along the row."""
    row = table.get(batch)
    if row is None or len(row) == 1:
        return [interpolated(table, batch, size) for size in sizes]
    rest, values = iter(row.items()), list[float]()
    (low, below), (high, above) = next(rest), next(rest)
    slope = (above - below) / (high - low)
    for size in sizes:
        while size > high:
            beyond = next(rest, None)
            if beyond is None:
                break
            (low, below), (high, above) = (high, above), beyond
            slope = (above - below) / (high - low)
        values.append(above if size == high else below if size <= low else below + slope * (size - low))
    return values


def interpolated(table: Mapping[int, Mapping[int, float]], batch: int, size: int) -> float:
    """An entry, or what lies on the line through its neighbours."""
    row = table.get(batch)
    if row is not None:
        return _value(row, size)
    sizes = list(table)
    place = bisect_left(sizes, batch)
    if len(sizes) == 1 or place == 0:
        return _value(table[sizes[0]], size)
    low, high = (sizes[place - 1], sizes[place]) if place < len(sizes) else (sizes[-2], sizes[-1])
    below, above = _value(table[low], size), _value(table[high], size)
    return max(below + (above - below) * (batch - low) / (high - low), 0.0)


def _value(row: Mapping[int, float], size: int) -> float:
    found = row.get(size)
    return _between(row, list(row), size) if found is None else found


def _between(row: Mapping[int, float], sizes: Sequence[int], size: int) -> float:
    """The value at a size that has no entry."""
    place = bisect_left(sizes, size)
    if len(sizes) == 1 or place == 0:
        return row[sizes[0]]
    low, high = (sizes[place - 1], sizes[place]) if place < len(sizes) else (sizes[-2], sizes[-1])
    return row[low] + (row[high] - row[low]) * (size - low) / (high - low)


def log_ratio(measured: float, predicted: float, largest: float) -> float:
    """What a round says about its costs, bounded; nothing where its time is no positive number."""
    if not (math.isfinite(measured) and measured > 0.0 and predicted > 0.0):
        return 0.0
    return max(-largest, min(largest, math.log(measured / predicted)))


def scale(table: dict[int, dict[int, float]], factor: float) -> None:
    """Multiply all entries."""
    for row in table.values():
        for size in row:
            row[size] *= factor


def correct(table: dict[int, dict[int, float]], batch: int, size: int, measured: float, predicted: float) -> None:
    """Let a table follow a measured time: the entry that was met by part of what it was wrong, all others a little.

    A plain round takes all of its batch along: what it took beyond the expected is the machine's doing, not its size's.

    Args:
        table: The table, changed in place.
        batch: Batch size of the round.
        size: Its tokens or levels.
        measured: Its seconds.
        predicted: What was expected of it.
    """
    ratio = log_ratio(measured, predicted, _LARGEST_RATIO)
    if batch not in table:
        sizes = next(iter(table.values()))
        table[batch] = {other: interpolated(table, batch, other) for other in sizes}
        _sort(table)
    row = table[batch]
    if size not in row:
        row[size] = _value(row, size)
        _sort(row)
    drift, kin, own = (math.exp(rate * ratio) for rate in (_DRIFT_RATE, _KIN_RATE, OWN_RATE))
    for other, entries in table.items():
        for entry in entries:
            is_near = other == batch
            entries[entry] *= own if is_near and size in (0, entry) else kin if is_near and entry > 0 else drift


def _sort(table: dict[int, Any]) -> None:
    ordered = sorted(table.items())
    table.clear()
    table.update(ordered)


def make_isotonic(row: dict[int, float]) -> None:
    """The nearest row, in least squares, that never falls: pool neighbours that are out of order."""
    blocks: list[tuple[float, int]] = []
    for seconds in row.values():
        blocks.append((seconds, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (right, n), (left, m) = blocks.pop(), blocks.pop()
            blocks.append(((left * m + right * n) / (m + n), m + n))
    if len(blocks) < len(row):
        sizes = iter(row)
        row.update({next(sizes): seconds for seconds, count in blocks for _ in range(count)})
