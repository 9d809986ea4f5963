"""Block types of GGUF files as panels that hold exactly the numbers of the file.

The layout of each type is that of `ggml-common.h` of llama.cpp. Types of 5, 6 and more bits have
integers of 8 bits here, those of 2 and 3 bits have 4.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from monge.backends.cpu.block_panels import COLUMNS, Blocks, Layout, panels_of_blocks

_ROWS: Final = 64 * COLUMNS  # of a matrix that are laid out together, which bounds the memory
_TABLE: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Integers of the types IQ4."""
_BYTE: Final = 128  # the zero of 8 bits


def _halves(raw: Tensor, *places: int) -> Tensor:
    """Float16 numbers at these bytes of every block, `[width, blocks, places]`."""
    return torch.cat([raw[..., at : at + 2] for at in places], dim=-1).view(torch.float16)


def _bits(raw: Tensor, bits: int, bytes_together: int) -> Tensor:
    """Unpack integers of 8, 4, 2 or 1 bits.

    Of each run of `bytes_together` bytes, the lowest bits of all bytes come first, then the next
    bits.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (raw.unflatten(-1, (-1, 1, bytes_together)) >> shifts & ((1 << bits) - 1)).flatten(-3)


def _scales_of_six_bits(raw: Tensor) -> Tensor:
    """Return the factors of scales and of minima of Q4_K and Q5_K, `[..., 8, 2]`."""
    first, second, high = raw.split(4, dim=-1)
    scale = torch.cat([first & 63, (high & 15) | (first >> 2 & 48)], dim=-1)
    least = torch.cat([second & 63, (high >> 4) | (second >> 2 & 48)], dim=-1)
    return torch.stack([scale, least], dim=-1).view(torch.int8)


def _negated_bases(halves: Tensor) -> Tensor:
    """Return scales and bases, given scales and minima: a minimum is subtracted, a base is added."""
    return halves * torch.tensor([1, -1], dtype=torch.float16)


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_bits(raw[..., 2:], 4, 16)[:, :, None], _halves(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(_bits(raw[..., 4:], 4, 16)[:, :, None], _halves(raw, 0, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Integers whose fifth bits lie in order."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return _bits(low, 4, 16) | (high[..., None] >> shifts & 1).flatten(-2) << 4


def _q5_0(raw: Tensor) -> Blocks:
    integers = _five_bits(raw[..., 2:6], raw[..., 6:]) + (_BYTE - 16)
    return Blocks(integers[:, :, None], _halves(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    return Blocks(_five_bits(raw[..., 4:8], raw[..., 8:])[:, :, None], _halves(raw, 0, 2))


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks((raw[..., 2:] ^ _BYTE)[:, :, None], _halves(raw, 0))


def _q2_k(raw: Tensor) -> Blocks:
    factors = torch.stack([raw[..., :16] & 15, raw[..., :16] >> 4], dim=-1).view(torch.int8)
    integers = _bits(raw[..., 16:80], 2, 32).unflatten(-1, (16, 16))
    return Blocks(integers, _negated_bases(_halves(raw, 80, 82)), factors)


def _q3_k(raw: Tensor) -> Blocks:
    high, low, packed = raw[..., :32], raw[..., 32:96], raw[..., 96:108]
    factors = _bits(packed[..., :8], 4, 8) | _bits(packed[..., 8:], 2, 4) << 4
    # 4 less where the bit is missing, and 8 is zero in 4 bits.
    integers = (_bits(low, 2, 32) | _bits(high, 1, 32) << 2) + 4
    return Blocks(
        integers.unflatten(-1, (16, 16)),
        _halves(raw, 108),
        (factors.view(torch.int8) - 32)[..., None],
    )


def _q4_k(raw: Tensor) -> Blocks:
    integers = _bits(raw[..., 16:], 4, 32).unflatten(-1, (8, 32))
    halves = _negated_bases(_halves(raw, 0, 2))
    return Blocks(integers, halves, _scales_of_six_bits(raw[..., 4:16]))


def _q5_k(raw: Tensor) -> Blocks:
    integers = _bits(raw[..., 48:], 4, 32) | _bits(raw[..., 16:48], 1, 32) << 4
    halves = _negated_bases(_halves(raw, 0, 2))
    return Blocks(integers.unflatten(-1, (8, 32)), halves, _scales_of_six_bits(raw[..., 4:16]))


def _q6_k(raw: Tensor) -> Blocks:
    low, high, scales = raw[..., :128], raw[..., 128:192], raw[..., 192:208]
    integers = (_bits(low, 4, 64) | _bits(high, 2, 32) << 4) + (_BYTE - 32)
    factors = scales.contiguous().view(torch.int8)[..., None]
    return Blocks(integers.unflatten(-1, (16, 16)), _halves(raw, 208), factors)


def _from_table(packed: Tensor) -> Tensor:
    table = torch.tensor(_TABLE, dtype=torch.int16) + _BYTE
    return table.to(torch.uint8)[_bits(packed, 4, 16).int()]


def _iq4_nl(raw: Tensor) -> Blocks:
    return Blocks(_from_table(raw[..., 2:])[:, :, None], _halves(raw, 0))


def _iq4_xs(raw: Tensor) -> Blocks:
    high = (raw[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    factors = _bits(raw[..., 4:8], 4, 1) | high << 4
    integers = _from_table(raw[..., 8:]).unflatten(-1, (8, 32))
    return Blocks(integers, _halves(raw, 0), (factors.view(torch.int8) - 32)[..., None])


BLOCK_TYPES: Final[dict[str, tuple[int, Layout, Callable[[Tensor], Blocks]]]] = {
    "Q4_0": (18, Layout(4, 32), _q4_0),
    "Q4_1": (20, Layout(4, 32, has_base=True), _q4_1),
    "Q5_0": (22, Layout(8, 32), _q5_0),
    "Q5_1": (24, Layout(8, 32, has_base=True), _q5_1),
    "Q8_0": (34, Layout(8, 32), _q8_0),
    "Q2_K": (84, Layout(4, 16, 16, has_base=True), _q2_k),
    "Q3_K": (110, Layout(4, 16, 16), _q3_k),
    "Q4_K": (144, Layout(4, 32, 8, has_base=True), _q4_k),
    "Q5_K": (176, Layout(8, 32, 8, has_base=True), _q5_k),
    "Q6_K": (210, Layout(8, 16, 16), _q6_k),
    "IQ4_NL": (18, Layout(8, 32), _iq4_nl),
    "IQ4_XS": (136, Layout(8, 32, 8), _iq4_xs),
}
"""Bytes of a block of a row, the layout, and what reads blocks, by the type's name in GGUF files."""


def panels_of_type(name: str, rows: Tensor) -> Tensor:
    """Return a matrix of a GGUF file in panels, `[panels, blocks, bytes]` of uint8.

    Args:
        name: The type of its blocks, a member of `BLOCK_TYPES`.
        rows: Their bytes, `[width, bytes]`, uint8.

    Raises:
        ValueError: If a scale is not finite.
    """
    num_bytes, layout, read = BLOCK_TYPES[name]
    panels: list[Tensor] = []
    for part in rows.split(_ROWS):
        blocks = read(part.unflatten(-1, (-1, num_bytes)))
        if not blocks.halves.isfinite().all():
            raise ValueError(f"a block of type {name} has an infinite scale, or NaN")
        panels.append(panels_of_blocks(layout, blocks))
    return torch.cat(panels)
