"""The machine code of products of a few rows: compiled once for a machine, and called by compiled programs."""

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

from monge.engine.compiled_store import StoredProgram, find_program, machine, scratch_folder, store_program
from monge.engine.few_rows import OPERATION

_SOURCE: Final = Path(__file__).with_name("few_rows.cpp")
_NATIVE: Final = () if sys.platform == "darwin" else ("-mcpu=native" if platform.machine() == "ppc64le" else "-march=native",)
"""For this very processor; compilers of macOS do not know the flag, and assume as much without it."""
_FLAGS: Final = ("-O3", *_NATIVE, "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
_DECLARATION: Final = (
    "AOTITorchError aoti_torch_cpu_few_rows("
    "AtenTensorHandle rows, AtenTensorHandle panels, int64_t width, AtenTensorHandle* out)"
)


@cache
def load_few_rows() -> None:
    """Make the machine code known to the programs that this process loads later.

    Raises:
        RuntimeError, OSError: As `few_rows_library`; or it cannot be loaded.
    """
    # Programs look for the function among all that the process knows.
    ctypes.CDLL(str(few_rows_library()), mode=ctypes.RTLD_GLOBAL)


def few_rows_library() -> Path:
    """Where the machine code lies; it is compiled where that was not done before.

    Raises:
        RuntimeError: If the compiler refuses; the message has its words.
        OSError: If there is no room for it.
    """
    key = hashlib.sha256(repr((torch.__version__, machine(), _FLAGS, _SOURCE.read_text())).encode()).hexdigest()[:32]
    stored, _ = find_program(key, ".so")
    return (stored or _build(key)).path


def program_options() -> dict[str, Any]:
    """Options of the compiler of programs: the operation is a call of the machine code, past torch's dispatch."""
    return {"aot_inductor.custom_ops_to_c_shims": {OPERATION: [_DECLARATION]}}


def _build(key: str) -> StoredProgram:
    from torch._inductor.cpp_builder import get_cpp_compiler

    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        library = Path(scratch) / "few_rows.so"
        command = [get_cpp_compiler(), *_FLAGS, f"-I{home / 'include'}", str(_SOURCE), f"-L{home / 'lib'}", "-ltorch_cpu"]
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"products of few rows do not compile: {_first_error(done.stderr)}")
        return store_program(key, library, {})


def _first_error(words: str) -> str:
    lines = words.strip().splitlines() or ["the compiler says nothing"]
    return next((line for line in lines if "error" in line), lines[0])
