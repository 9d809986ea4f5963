"""Q4_K and Q6_K, which `gguf` reads and does not write.

llama.cpp searches for scales of small weighted error. Here scales are the smallest that hold the range of
their group, so every number is within half a step of its own.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 256
"""Numbers of a block."""
_CHUNK: Final = 1 << 12  # blocks at once, as intermediate results are larger than the blocks
Array = NDArray[Any]  # float32 in, uint8 out: numpy's types know no more of what lies between


def quantize(rows: Array, name: str) -> Array:
    """Quantise the rows of a matrix.

    Args:
        rows: `[width, depth]`, float32; the depth is divisible by 32, for K types by 256.
        name: A K type of this file, or a type that `gguf` writes.

    Returns:
        `[width, bytes]`, uint8.
    """
    if name in _K_TYPES:
        blocks = rows.reshape(-1, BLOCK)
        parts = [_K_TYPES[name](blocks[at : at + _CHUNK]) for at in range(0, len(blocks), _CHUNK)]
        return np.concatenate(parts).reshape(len(rows), -1)
    import gguf

    return gguf.quantize(rows, gguf.GGMLQuantizationType[name])


def _q4_k(blocks: Array) -> Array:
    """`d * scale * q - dmin * minimum` in 8 groups of 32, with 6 bits for scales and minima, 4 for q."""
    groups = blocks.reshape(-1, 8, 32)
    lows = np.maximum(-groups.min(axis=2), 0)
    dmin = _half_above(lows.max(axis=1, keepdims=True) / 63)
    minima = _multiples(lows, dmin, 63)
    base = dmin * minima
    ranges = np.maximum(groups.max(axis=2) + base, 0) / 15
    d = _half_above(ranges.max(axis=1, keepdims=True) / 63)
    scales = _multiples(ranges, d, 63)
    q = _rounded(groups + base[..., None], d * scales).clip(0, 15).astype(np.uint8)
    q = q.reshape(-1, 4, 2, 32)
    (low, high), (low_min, high_min) = (
        (one[:, :4], one[:, 4:]) for one in (scales.astype(np.uint8), minima.astype(np.uint8))
    )
    return np.concatenate(
        [
            _halves(d),
            _halves(dmin),
            low | high >> 4 << 6,
            low_min | high_min >> 4 << 6,
            high & 15 | high_min << 4,
            (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128),
        ],
        axis=1,
    )


def _q6_k(blocks: Array) -> Array:
    """`d * scale * (q - 32)` in 16 groups of 16, with 8 bits for scales, 6 for q."""
    groups = blocks.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=2) / 31
    d = _half_above(steps.max(axis=1, keepdims=True) / 127)
    scales = _multiples(steps, d, 127)
    q = (_rounded(groups, d * scales) + 32).clip(0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    lower, upper = q & 15, q >> 4
    return np.concatenate(
        [
            (lower[:, :, :2] | lower[:, :, 2:] << 4).reshape(-1, 128),
            np.bitwise_or.reduce(upper << np.array([[0], [2], [4], [6]], np.uint8), axis=2).reshape(
                -1, 64
            ),
            scales.astype(np.uint8),
            _halves(d),
        ],
        axis=1,
    )


_K_TYPES: Final[dict[str, Callable[[Array], Array]]] = {"Q4_K": _q4_k, "Q6_K": _q6_k}


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
