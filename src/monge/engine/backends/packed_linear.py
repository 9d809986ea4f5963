"""Products of a few rows with a matrix whose numbers lie in panels.

A torch operation, a module, and its machine code.
"""

import ctypes
import hashlib
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from monge.engine.backends.program_cache import (
    StoredProgram,
    find_program,
    machine,
    scratch_folder,
    store_program,
)

COLUMNS: Final = 32
"""Columns of a panel, see `packed_linear.cpp`."""
_LOWER: Final = 0xFFFF  # half of a word
_SOURCE: Final = Path(__file__).with_name("packed_linear.cpp")
_NATIVE: Final = (
    ()
    if sys.platform == "darwin"
    else ("-mcpu=native" if platform.machine() == "ppc64le" else "-march=native",)
)
"""For this very processor; compilers of macOS do not know the flag, and assume as much without it."""
_FLAGS: Final = ("-O3", *_NATIVE, "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
_DECLARATION: Final = (
    "AOTITorchError aoti_torch_cpu_packed_linear("
    "AtenTensorHandle rows, AtenTensorHandle panels, int64_t width, AtenTensorHandle* out)"
)

_LIBRARY: Final = torch.library.Library("monge", "DEF")  # operations are known as long as it lives
# The machine code reads rows that lie one behind another.
_LIBRARY.define(
    "packed_linear(Tensor rows, Tensor panels, int width) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


class PackedLinear(torch.nn.Module):
    """A linear map in float32 whose matrix lies in panels.

    Args:
        matrix: `[width, depth]`, float32. Where all of its numbers are bfloat16 numbers, the panels
            hold 16 bits of each.
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


def matrix_of(panels: Tensor, width: int) -> Tensor:
    """The inverse of `panels_of`: `[width, depth]`, float32."""
    if panels.dtype == torch.int32:
        panels = torch.cat(
            [(panels << 16).view(torch.float32), (panels & ~_LOWER).view(torch.float32)], dim=-1
        )
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:width]


def _packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    return torch.nn.functional.linear(rows, matrix_of(panels, width))


def _shape_of_packed_linear(rows: Tensor, panels: Tensor, width: int) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], width)


# What runs outside of compiled programs: the plain twin.
_LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("monge::packed_linear", _shape_of_packed_linear, lib=_LIBRARY)

_NAMESPACE: Any = torch.ops.monge
OPERATION: Final = _NAMESPACE.packed_linear.default
"""`(rows, panels, width) -> rows x matrix`."""


def pack_linears(module: torch.nn.Module) -> None:
    """Lay out anew the weights of linear maps inside a module, which is changed.

    The tensors that it had are not.

    Float32 maps become `PackedLinear`; weights of float64, and of maps that are more than a map,
    lie transposed. Half precision stays: torch has products of few rows for the usual order only,
    in the other they take ten times longer.

    Args:
        module: A module; itself no linear map.
    """
    made = dict[int, torch.nn.Module]()  # a map that is used in several places stays one
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            if id(child) not in made:
                made[id(child)] = _packed(child)
            if made[id(child)] is not child:
                parent.add_module(name, made[id(child)])


def _packed(child: torch.nn.Module) -> torch.nn.Module:
    if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
        return PackedLinear(child.weight, child.bias)
    if type(child) is Conv1D and child.weight.dtype == torch.float32:
        return PackedLinear(child.weight.t(), child.bias)
    if isinstance(child, torch.nn.Linear) and child.weight.dtype in {torch.float32, torch.float64}:
        child.weight = torch.nn.Parameter(
            child.weight.detach().t().contiguous().t(), requires_grad=False
        )
    return child


@cache
def load_packed_linear() -> None:
    """Make the machine code known to the programs that this process loads later.

    Raises:
        RuntimeError, OSError: As `packed_linear_library`; or it cannot be loaded.
    """
    # Programs look for the function among all that the process knows.
    ctypes.CDLL(str(packed_linear_library()), mode=ctypes.RTLD_GLOBAL)


def packed_linear_library() -> Path:
    """Where the machine code lies; it is compiled where that was not done before.

    Raises:
        RuntimeError: If the compiler refuses; the message has its words.
        OSError: If there is no room for it.
    """
    key = hashlib.sha256(
        repr((torch.__version__, machine(), _FLAGS, _SOURCE.read_text())).encode()
    ).hexdigest()[:32]
    stored, _ = find_program(key, ".so")
    return (stored or _build(key)).path


def compiler_options() -> dict[str, Any]:
    """Options of the compiler of programs.

    The operation is a call of the machine code, past torch's dispatch.
    """
    return {"aot_inductor.custom_ops_to_c_shims": {OPERATION: [_DECLARATION]}}


def _build(key: str) -> StoredProgram:
    from torch._inductor.cpp_builder import get_cpp_compiler

    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        library = Path(scratch) / "packed_linear.so"
        command = [
            get_cpp_compiler(),
            *_FLAGS,
            f"-I{home / 'include'}",
            str(_SOURCE),
            f"-L{home / 'lib'}",
            "-ltorch_cpu",
        ]
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"products of few rows do not compile: {_first_error(done.stderr)}")
        return store_program(key, library, {})


def _first_error(words: str) -> str:
    lines = words.strip().splitlines() or ["the compiler says nothing"]
    return next((line for line in lines if "error" in line), lines[0])
