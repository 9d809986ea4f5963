"""Types of GGUF files that `gguf` reads and does not write: K types, IQ4_NL and IQ4_XS.

llama.cpp searches for scales of small weighted error. Here scales are the smallest that hold the range of
their group, so every number is within half a step of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 256
"""Numbers of a block."""
_SMALL: Final = 32
"""Those of a block of IQ4_NL."""
_TABLE: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Integers of the types IQ4."""
_CHUNK: Final = 1 << 12  # blocks at once, as intermediate results are larger than the blocks
Array = NDArray[Any]  # float32 in, uint8 out: numpy's types know no more of what lies between


def quantize(rows: Array, name: str) -> Array:
    """Quantise the rows of a matrix.

    Args:
        rows: `[width, depth]`, float32; the depth is divisible by 32, for K types and IQ4_XS by 256.
        name: A type of this file, or a type that `gguf` writes.

    Returns:
        `[width, bytes]`, uint8, or float16 numbers.
    """
    if name in _TYPES:
        size, written = _TYPES[name]
        blocks = rows.reshape(-1, size)
        parts = [written(blocks[at : at + _CHUNK]) for at in range(0, len(blocks), _CHUNK)]
        return np.concatenate(parts).reshape(len(rows), -1)
    import gguf

    return gguf.quantize(rows, gguf.GGMLQuantizationType[name])


def _with_minima(
    groups: Array, largest: int, factor: int
) -> tuple[Array, Array, Array, Array, Array]:
    """`d * scale * q - dmin * minimum` for groups, `[blocks, groups, numbers]`.

    Args:
        groups: The numbers.
        largest: Largest q.
        factor: Largest scale and minimum.

    Returns:
        d and dmin, `[blocks, 1]`; scales and minima, `[blocks, groups]`, uint8; and q, uint8.
    """
    lows = np.maximum(-groups.min(axis=2), 0)
    dmin = _half_above(lows.max(axis=1, keepdims=True) / factor)
    minima = _multiples(lows, dmin, factor)
    base = dmin * minima
    ranges = np.maximum(groups.max(axis=2) + base, 0) / largest
    d = _half_above(ranges.max(axis=1, keepdims=True) / factor)
    scales = _multiples(ranges, d, factor)
    q = _rounded(groups + base[..., None], d * scales).clip(0, largest).astype(np.uint8)
    return d, dmin, scales.astype(np.uint8), minima.astype(np.uint8), q


def _symmetric(groups: Array, largest: int, factor: int) -> tuple[Array, Array, Array]:
    """`d * scale * q` with q in both signs: d, scales as int8, and q as float32."""
    steps = np.abs(groups).max(axis=2) / largest
    d = _half_above(steps.max(axis=1, keepdims=True) / factor)
    scales = _multiples(steps, d, factor)
    return d, scales.astype(np.int8), _rounded(groups, d * scales).clip(-largest - 1, largest)


def _q2_k(blocks: Array) -> Array:
    """16 groups of 16, with 4 bits for scales and minima, 2 for q."""
    d, dmin, scales, minima, q = _with_minima(blocks.reshape(-1, 16, 16), 3, 15)
    return np.concatenate(
        [scales | minima << 4, _runs(q, 2, 32), _halves(d), _halves(dmin)], axis=1
    )


def _q3_k(blocks: Array) -> Array:
    """16 groups of 16, with 6 bits for scales, 3 for q."""
    d, scales, q = _symmetric(blocks.reshape(-1, 16, 16), 3, 31)
    shifted, q = scales.astype(np.uint8) + 32, (q + 4).astype(np.uint8)
    low, high = _runs(shifted & 15, 4, 8), _runs(shifted >> 4, 2, 4)
    return np.concatenate(
        [_runs(q >> 2, 1, 32), _runs(q & 3, 2, 32), low, high, _halves(d)], axis=1
    )


def _q4_or_5_k(blocks: Array, bits: int) -> Array:
    """8 groups of 32, with 6 bits for scales and minima, 4 or 5 for q."""
    d, dmin, scales, minima, q = _with_minima(blocks.reshape(-1, 8, 32), (1 << bits) - 1, 63)
    (low, high), (low_min, high_min) = ((one[:, :4], one[:, 4:]) for one in (scales, minima))
    return np.concatenate(
        [
            _halves(d),
            _halves(dmin),
            low | high >> 4 << 6,
            low_min | high_min >> 4 << 6,
            high & 15 | high_min << 4,
            *([_runs(q >> 4, 1, 32)] if bits == 5 else []),
            _runs(q & 15, 4, 32),
        ],
        axis=1,
    )


def _q6_k(blocks: Array) -> Array:
    """16 groups of 16, with 8 bits for scales, 6 for q."""
    d, scales, q = _symmetric(blocks.reshape(-1, 16, 16), 31, 127)
    q = (q + 32).astype(np.uint8)
    return np.concatenate(
        [_runs(q & 15, 4, 64), _runs(q >> 4, 2, 32), scales.view(np.uint8), _halves(d)], axis=1
    )


def _iq4_nl(blocks: Array) -> Array:
    """`d * table[q]`."""
    d = _half_above(np.abs(blocks).max(axis=1, keepdims=True) / _TABLE[-1])
    return np.concatenate([_halves(d), _runs(_nearest(blocks, d), 4, 16)], axis=1)


def _iq4_xs(blocks: Array) -> Array:
    """`d * scale * table[q]` in 8 groups of 32, with 6 bits for scales."""
    groups = blocks.reshape(-1, 8, 32)
    d, scales, _ = _symmetric(groups, _TABLE[-1], 31)
    shifted = scales.astype(np.uint8) + 32
    q = _nearest(groups, (d * scales)[..., None])
    low, high = _runs(shifted & 15, 4, 1), (shifted >> 4).reshape(-1, 2, 4) << np.arange(0, 8, 2)
    high = high.sum(axis=2).astype(np.uint8)
    return np.concatenate([_halves(d), high, low, _runs(q, 4, 16)], axis=1)


_TYPES: Final[dict[str, tuple[int, Callable[[Array], Array]]]] = {
    "Q2_K": (BLOCK, _q2_k),
    "Q3_K": (BLOCK, _q3_k),
    "Q4_K": (BLOCK, partial(_q4_or_5_k, bits=4)),
    "Q5_K": (BLOCK, partial(_q4_or_5_k, bits=5)),
    "Q6_K": (BLOCK, _q6_k),
    "IQ4_NL": (_SMALL, _iq4_nl),
    "IQ4_XS": (BLOCK, _iq4_xs),
}


def _runs(integers: Array, bits: int, bytes_together: int) -> Array:
    """Pack integers of a block: of each run of bytes, the lowest bits of all bytes come first."""
    parts = integers.reshape(len(integers), -1, 8 // bits, bytes_together)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(integers), -1)


def _nearest(values: Array, steps: Array) -> Array:
    """Places of the nearest integers of the table."""
    edges = np.convolve(_TABLE, [0.5, 0.5], "valid")
    return np.searchsorted(edges, _ratio(values, steps)).astype(np.uint8)


def _half_above(values: Array) -> Array:
    """The smallest float16 numbers that are not below these, as float32."""
    half = values.astype(np.float16)
    above = np.nextafter(half, np.float16(np.inf))
    return np.where(half.astype(np.float32) < values, above, half).astype(np.float32)


def _multiples(values: Array, unit: Array, most: int) -> Array:
    """How often a unit is taken to reach these values, at least."""
    return np.minimum(np.ceil(_ratio(values, unit)), most)


def _rounded(groups: Array, steps: Array) -> Array:
    return np.rint(_ratio(groups, steps[..., None]))


def _ratio(values: Array, unit: Array) -> Array:
    """Zero where the unit is zero, as the values are then."""
    return np.divide(values, unit, out=np.zeros_like(values), where=unit > 0)


def _halves(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint8)
