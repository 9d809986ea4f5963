"""Products of a few rows with a matrix: as an operation of torch, and as a module in the place of a linear map."""

from typing import Any, Final

import torch
from torch import Tensor

COLUMNS: Final = 32
"""Columns of a panel, see `few_rows.cpp`."""
_LOWER: Final = 0xFFFF  # half of a word

_LIBRARY: Final = torch.library.Library("monge", "DEF")  # operations are known as long as it lives
# The machine code reads rows that lie one behind another.
_LIBRARY.define("few_rows(Tensor rows, Tensor panels, int width) -> Tensor", tags=(torch.Tag.needs_exact_strides,))


class FewRows(torch.nn.Module):
    """A linear map in float32 whose matrix lies in panels.

    Args:
        matrix: `[width, depth]`, float32. Where all of its numbers are bfloat16 numbers, the panels hold 16 bits of each.
        bias: `[width]`, if any.
    """

    panels: Tensor

    def __init__(self, matrix: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.width, self.bias = len(matrix), bias
        self.register_buffer("panels", panels_of(matrix))

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., depth]` -> `[..., width]`."""
        out = OPERATION(rows.contiguous(), self.panels, self.width)
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        """The matrix, for networks that look at it."""
        return matrix_of(self.panels, self.width)


def panels_of(matrix: Tensor) -> Tensor:
    """A matrix in panels of 32 of its rows; zeros fill the last.

    Args:
        matrix: `[width, depth]`, float32.

    Returns:
        `[panels, depth, 16]` of int32, two bfloat16 numbers each, if these hold the matrix exactly; else `[panels, depth, 32]`
        of float32.
    """
    width, depth = matrix.shape
    filled = torch.nn.functional.pad(matrix.detach(), (0, 0, 0, -width % COLUMNS))
    panels = filled.reshape(-1, COLUMNS, depth).transpose(1, 2).contiguous()
    narrow = panels.bfloat16()
    if not torch.equal(narrow.float(), panels):
        return panels
    lower, upper = (narrow.view(torch.int16).int() & _LOWER).split(COLUMNS // 2, dim=-1)
    return (lower | upper << 16).contiguous()


def matrix_of(panels: Tensor, width: int) -> Tensor:
    """The inverse of `panels_of`: `[width, depth]`, float32."""
    if panels.dtype == torch.int32:
        panels = torch.cat([(panels << 16).view(torch.float32), (panels & ~_LOWER).view(torch.float32)], dim=-1)
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:width]


def _few_rows(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    return torch.nn.functional.linear(rows, matrix_of(panels, width))


def _shape_of_few_rows(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], width)


_LIBRARY.impl("few_rows", _few_rows, "CPU")  # what runs outside of compiled programs: the plain twin
torch.library.register_fake("monge::few_rows", _shape_of_few_rows, lib=_LIBRARY)

_NAMESPACE: Any = torch.ops.monge
OPERATION: Final = _NAMESPACE.few_rows.default
"""`(rows, panels, width) -> rows x matrix`."""
