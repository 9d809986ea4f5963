"""Products of a few rows with a matrix whose numbers lie in panels.

A torch operation, a module, and its machine code.

A forward of a few tokens is bound by reading the weights, so their size decides how long it takes:
panels hold float32 numbers, bfloat16 numbers, or integers of 8 bits with a scale for every 64.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from monge.engine.backends.native_library import OPERATIONS, native_function

COLUMNS: Final = 32
"""Columns of a panel, see `packed_linear.cpp`."""
GROUP: Final = 64
"""Numbers of a row that share a scale where weights have 8 bits."""
WEIGHTS: Final = ("exact", "bfloat16", "int8")
"""How the numbers of a matrix are stored: as they are, or rounded."""
_SCALES: Final = 2 * COLUMNS  # bytes
_ZERO: Final = 128  # what an integer 0 is stored as
_LARGEST: Final = 127
_LOWER: Final = 0xFFFF  # half of a word
_SOURCE: Final = Path(__file__).with_name("packed_linear.cpp")
DECLARATION: Final = (
    "AOTITorchError aoti_torch_cpu_packed_linear("
    "AtenTensorHandle rows, AtenTensorHandle panels, int64_t width, AtenTensorHandle* out)"
)
"""Of the function that compiled programs call."""

# The machine code reads rows that lie one behind another.
OPERATIONS.define(
    "packed_linear(Tensor rows, Tensor panels, int width) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


class PackedLinear(torch.nn.Module):
    """A linear map in float32 whose matrix lies in panels.

    Args:
        matrix: `[width, depth]`, float32. Where all of its numbers are bfloat16 numbers, the panels
            hold 16 bits of each.
        bias: `[width]`, if any.
        weights: One of `WEIGHTS`. With `int8` the rows that are multiplied are rounded as well.
    """

    panels: Tensor

    def __init__(
        self, matrix: Tensor, bias: Tensor | None = None, *, weights: str = "exact"
    ) -> None:
        super().__init__()
        self.width, self.depth = matrix.shape
        self.bias, self.weights = bias, weights
        if weights == "int8":
            panels = rounded_panels_of(matrix)
        else:
            panels = panels_of(matrix.bfloat16().float() if weights == "bfloat16" else matrix)
        self.register_buffer("panels", panels)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., depth]` -> `[..., width]`."""
        out = OPERATION(rows.contiguous(), self.panels, self.width)
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        """The matrix, for networks that look at it."""
        return matrix_of(self.panels, self.width, self.depth)


def panels_of(matrix: Tensor) -> Tensor:
    """A matrix in panels of 32 of its rows; zeros fill the last.

    Args:
        matrix: `[width, depth]`, float32.

    Returns:
        `[panels, depth, 16]` of int32, two bfloat16 numbers each, if these hold the matrix exactly;
        else `[panels, depth, 32]` of float32.
    """
    width, depth = matrix.shape
    filled = torch.nn.functional.pad(matrix.detach(), (0, 0, 0, -width % COLUMNS))
    panels = filled.reshape(-1, COLUMNS, depth).transpose(1, 2).contiguous()
    narrow = panels.bfloat16()
    if not torch.equal(narrow.float(), panels):
        return panels
    lower, upper = (narrow.view(torch.int16).int() & _LOWER).split(COLUMNS // 2, dim=-1)
    return (lower | upper << 16).contiguous()


def rounded_panels_of(matrix: Tensor) -> Tensor:
    """A matrix in panels of 8-bit integers, `[panels, groups, bytes]` of uint8.

    A group is 64 numbers of each of 32 rows: 32 bfloat16 scales, in the order of a bfloat16 line,
    then the numbers divided by their scale and rounded, four of each row side by side. A scale is
    the largest number of its group divided by 127, rounded up to bfloat16.

    Args:
        matrix: `[width, depth]`, float32.
    """
    width, depth = matrix.shape
    filled = torch.nn.functional.pad(matrix.detach(), (0, -depth % GROUP, 0, -width % COLUMNS))
    groups = filled.reshape(-1, COLUMNS, filled.shape[1] // GROUP, GROUP).transpose(1, 2)
    scales = groups.abs().amax(dim=-1) / _LARGEST
    # Towards infinity: the largest number must not round to 128.
    raised = ((scales.view(torch.int32) + _LOWER) >> 16).to(torch.int16)
    scales = raised.view(torch.bfloat16).float()
    numbers = torch.where(scales[..., None] > 0, groups / scales[..., None], 0.0).round()
    stored = (numbers + _ZERO).to(torch.uint8).unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)
    # Words of two scales: those of columns j and 16 + j.
    paired = raised.unflatten(-1, (2, COLUMNS // 2)).transpose(2, 3).contiguous()
    return torch.cat([paired.view(torch.uint8).flatten(2), stored], dim=-1)


def matrix_of(panels: Tensor, width: int, depth: int | None = None) -> Tensor:
    """The inverse of `panels_of` and `rounded_panels_of`: `[width, depth]`, float32."""
    if panels.dtype == torch.uint8:
        raised = panels[..., :_SCALES].contiguous().view(torch.int16)
        scales = raised.unflatten(-1, (COLUMNS // 2, 2)).transpose(2, 3).flatten(2)
        numbers = panels[..., _SCALES:].unflatten(-1, (-1, COLUMNS, 4)).transpose(2, 3).flatten(3)
        groups = (numbers.float() - _ZERO) * scales.contiguous().view(torch.bfloat16)[..., None]
        return groups.transpose(1, 2).flatten(2).flatten(0, 1)[:width, :depth]
    if panels.dtype == torch.int32:
        panels = torch.cat(
            [(panels << 16).view(torch.float32), (panels & ~_LOWER).view(torch.float32)], dim=-1
        )
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:width]


def rounded_rows(rows: Tensor) -> Tensor:
    """Rows as products with 8-bit panels read them.

    Every 64 numbers are multiples of their largest one / 127. They count as zeros where 127 / the
    largest one is not finite.
    """
    depth = rows.shape[-1]
    groups = torch.nn.functional.pad(rows, (0, -depth % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    is_rounded = largest > _LARGEST / torch.finfo(rows.dtype).max
    numbers = torch.where(is_rounded, groups * (_LARGEST / largest), 0.0).round()
    return (numbers * (largest / _LARGEST)).flatten(-2)[..., :depth]


def _packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    is_rounded = panels.dtype == torch.uint8
    wanted = -(-rows.shape[-1] // GROUP) if is_rounded else rows.shape[-1]
    if panels.shape[1] != wanted:  # the machine code would read past the panels
        raise ValueError(
            f"rows of {rows.shape[-1]} numbers do not fit panels {tuple(panels.shape)}"
        )
    if rows.dtype == torch.float32 and (run := _machine_code()) is not None:
        out = rows.new_empty(*rows.shape[:-1], width)
        depth = rows.shape[-1]
        rows = rows.contiguous()
        failed = run(
            rows.data_ptr(),
            panels.data_ptr(),
            out.data_ptr(),
            rows.numel() // max(depth, 1),
            depth,
            width,
            _TYPE_NUMBERS[panels.dtype],
        )
        if failed:
            raise RuntimeError("products of few rows failed")
        return out
    return plain_packed_linear(rows, panels, width)


def plain_packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    """The plain twin of the machine code, in the type of the rows."""
    matrix = matrix_of(panels, width, rows.shape[-1]).to(rows.dtype)
    return torch.nn.functional.linear(
        rounded_rows(rows) if panels.dtype == torch.uint8 else rows, matrix
    )


def _shape_of_packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], width)


# What runs outside of compiled programs.
OPERATIONS.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("monge::packed_linear", _shape_of_packed_linear, lib=OPERATIONS)

_NAMESPACE: Any = torch.ops.monge
OPERATION: Final = _NAMESPACE.packed_linear.default
"""`(rows, panels, width) -> rows x matrix`."""
# Of `aoti_torch_dtype_*`.
_TYPE_NUMBERS: Final = {torch.uint8: 0, torch.int32: 3, torch.float32: 6}


def pack_linears(module: torch.nn.Module, weights: str = "exact") -> None:
    """Lay out anew the weights of linear maps inside a module, which is changed.

    The tensors that it had are not.

    Float32 maps become `PackedLinear`; weights of float64, and of maps that are more than a map,
    lie transposed. Half precision stays: torch has products of few rows for the usual order only,
    in the other they take ten times longer.

    Args:
        module: A module; itself no linear map.
        weights: How the maps that become `PackedLinear` store their matrix, one of `WEIGHTS`.
    """
    made = dict[int, torch.nn.Module]()  # a map that is used in several places stays one
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            if id(child) not in made:
                made[id(child)] = _packed(child, weights)
            if made[id(child)] is not child:
                parent.add_module(name, made[id(child)])


def pack_draft_module(module: torch.nn.Module) -> None:
    """Store the float32 maps of a module that only drafts in 8 bits, in place.

    Args:
        module: A module; itself no linear map.
    """
    load_packed_linear()
    pack_linears(module, "int8")


def _packed(child: torch.nn.Module, weights: str) -> torch.nn.Module:
    weight: Any = getattr(child, "weight", None)
    is_map = type(child) is torch.nn.Linear or getattr(child, "is_linear_map", False)
    if is_map and weight.dtype == torch.float32 and weight.device.type == "cpu":
        bias: Any = child.bias
        return PackedLinear(weight, bias, weights=weights)
    if type(child) is Conv1D and child.weight.dtype == torch.float32:
        return PackedLinear(child.weight.t(), child.bias, weights=weights)
    if isinstance(child, torch.nn.Linear) and child.weight.dtype in {torch.float32, torch.float64}:
        child.weight = torch.nn.Parameter(
            child.weight.detach().t().contiguous().t(), requires_grad=False
        )
    return child


_LOADED: Final = list[Any]()


@cache
def load_packed_linear() -> None:
    """Make the machine code known to the programs that this process loads later.

    Raises:
        RuntimeError, OSError: As `native_function`.
    """
    arguments = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 3, ctypes.c_int32)
    _LOADED.append(native_function(_SOURCE, "monge_packed_linear", arguments))


def _machine_code() -> Any:
    """The function, where a program or a packed network has loaded it."""
    return _LOADED[-1] if _LOADED else None
