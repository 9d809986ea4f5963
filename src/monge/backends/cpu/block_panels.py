"""Panels of integers with factors, which hold blocks of quantised files without rounding their numbers again.

A block is some groups of a row's numbers. A number is `(integer - zero) * scale + base` in float32.
Scale and base are float16 numbers of the block, or products of these with an integer of the group,
which are computed in float32, as `gguf.dequantize` computes them.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

COLUMNS: Final = 32
"""Columns of a panel, see `packed_linear.cpp`."""
_HALF: Final = 2  # bytes
_QUAD: Final = 4  # numbers of a column side by side


@dataclass(frozen=True, slots=True)
class Layout:
    """How panels store a block; `Block` of `packed_linear.cpp`.

    Args:
        bits: Bits of an integer, 4 or 8.
        group: Numbers of a group, 16 or 32.
        groups: Groups of a block. With several, a group has an int8 factor of its scale and base.
        has_base: Whether numbers have a base.
    """

    bits: int
    group: int
    groups: int = 1
    has_base: bool = False

    @property
    def zero(self) -> int:
        """The integer that is subtracted."""
        return 0 if self.has_base else 1 << (self.bits - 1)

    @property
    def size(self) -> int:
        """Numbers of a block."""
        return self.group * self.groups

    @property
    def head(self) -> int:
        """Bytes of a block's float16 factors."""
        return _HALF * COLUMNS * (1 + self.has_base)

    @property
    def factors(self) -> int:
        """Bytes of a group's int8 factors."""
        return COLUMNS * (1 + self.has_base) if self.groups > 1 else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a block of all columns; no two layouts have the same."""
        return self.head + self.groups * (self.factors + COLUMNS * self.group * self.bits // 8)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a matrix.

    Args:
        integers: `[width, blocks, groups, group]`, uint8.
        halves: Scales and bases, `[width, blocks, 1 or 2]`, float16.
        factors: Their factors, `[width, blocks, groups, 1 or 2]`, int8; `None` without.
    """

    integers: Tensor
    halves: Tensor
    factors: Tensor | None = None


LAYOUTS: Final = {
    layout.num_bytes: layout
    for layout in (
        *(Layout(bits, 32, has_base=has_base) for bits in (4, 8) for has_base in (False, True)),
        *(Layout(bits, 32, 8, has_base=True) for bits in (4, 8)),
        Layout(8, 32, 8),
        *(Layout(bits, 16, 16) for bits in (4, 8)),
        Layout(4, 16, 16, has_base=True),
    )
}
"""Layouts that the machine code knows, by the bytes of a block."""


def layout_of(panels: Tensor) -> Layout | None:
    """The layout of panels, or `None` where they hold other than blocks."""
    return LAYOUTS.get(panels.shape[2]) if panels.dtype == torch.uint8 else None


def panels_of_blocks(layout: Layout, blocks: Blocks) -> Tensor:
    """Return blocks in panels of 32 of their rows, `[panels, blocks, bytes]` of uint8; zeros fill the last.

    A block of a panel has 32 scales, 32 bases if any, then its groups: 32 factors of scales, 32 of
    bases, and lines of four bytes of each column. A byte of 4-bit integers has a number of a quad
    in the lower half, and a number of the next quad in the upper half.
    """
    integers = _in_panels(blocks.integers)
    if layout.bits == 4:
        lower, upper = integers.unflatten(-1, (-1, 2, _QUAD)).unbind(dim=-2)
        quads = lower | upper << 4
    else:
        quads = integers.unflatten(-1, (-1, _QUAD))
    body = quads.permute(0, 2, 3, 4, 1, 5).flatten(3)
    if blocks.factors is not None:
        factors = _in_panels(blocks.factors).permute(0, 2, 3, 4, 1).flatten(3)
        body = torch.cat([factors.contiguous().view(torch.uint8), body], dim=-1)
    halves = _in_panels(blocks.halves).permute(0, 2, 3, 1).flatten(2)
    head = halves.contiguous().view(torch.uint8)
    return torch.cat([head, body.flatten(2)], dim=-1)


def _in_panels(tensor: Tensor) -> Tensor:
    """`[width, ...]` -> `[panels, columns, ...]`."""
    missing = -tensor.shape[0] % COLUMNS
    filled = (
        torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
    )
    return filled.unflatten(0, (-1, COLUMNS))


def matrix_of_blocks(panels: Tensor, layout: Layout) -> Tensor:
    """The numbers of panels, `[panels * 32, depth]`, float32."""
    return _numbers_of(layout, *_columns_of(panels, layout)).flatten(0, 1)


def rows_of_blocks(panels: Tensor, layout: Layout, row_ids: Tensor) -> Tensor:
    """Rows of the matrix, `[rows, depth]`, float32; `row_ids` are their numbers, `[rows]`."""
    panel, column = row_ids // COLUMNS, row_ids % COLUMNS
    return _numbers_of(layout, *(part[panel, column] for part in _columns_of(panels, layout)))


def _columns_of(panels: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the bytes of halves, factors and quads, `[panels, columns, blocks, ...]` each."""
    head, body = panels[..., : layout.head], panels[..., layout.head :]
    halves = head.unflatten(-1, (-1, COLUMNS, _HALF)).movedim(3, 1)
    groups = body.unflatten(-1, (layout.groups, -1))
    factors, quads = groups[..., : layout.factors], groups[..., layout.factors :]
    factors = factors.unflatten(-1, (layout.factors // COLUMNS, COLUMNS)).movedim(4, 1)
    return halves, factors, quads.unflatten(-1, (-1, COLUMNS, _QUAD)).movedim(4, 1)


def _numbers_of(layout: Layout, halves: Tensor, factors: Tensor, quads: Tensor) -> Tensor:
    """`[..., depth]` of `[..., blocks, 1 or 2, 2]`, `[..., blocks, groups, 0 to 2]` and `[..., blocks, groups, lines, 4]`."""
    lower, upper = halves.int().unbind(dim=-1)
    # Put together as integers: compilers cannot read bytes as another type without a copy.
    scales = (lower | upper << 8).to(torch.int16).view(torch.float16).float()[..., None, :]
    if layout.groups > 1:
        scales = scales * factors.view(torch.int8).float()
    if layout.bits == 4:
        quads = torch.stack([quads & 15, quads >> 4], dim=-2).flatten(-3, -2)
    numbers = (quads.flatten(-2).float() - layout.zero) * scales[..., :1]
    if layout.has_base:
        numbers = numbers + scales[..., 1:]
    return numbers.flatten(-3)
