"""Machine code for this processor: C++ sources of this folder, compiled at first use and kept."""

import ctypes
import hashlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from monge.backends.cpu.code_cache import (
    PROGRAMS,
    StoredCode,
    load_or_make,
    machine,
    store_code,
    writable_folder,
)

_NATIVE: Final = (
    ()
    if sys.platform == "darwin"
    else ("-mcpu=native" if platform.machine() == "ppc64le" else "-march=native",)
)
"""For this very processor; compilers of macOS do not know the flag, and assume as much without it."""
_FLAGS: Final = ("-O3", *_NATIVE, "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")

_FOLDER: Final = Path(__file__).parent

OPERATIONS: Final = torch.library.Library("monge", "DEF")
"""Torch operations that the machine code implements; they are known as long as it lives."""


def why_no_compiler() -> str | None:
    """Return the reason why nothing can be compiled on this machine, if so."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler on this machine; install g++ or clang++, or name one in the environment variable CXX"
    return None


def native_library(source: Path) -> Path:
    """Return the path of the machine code of a source file, compiled at its first use.

    Raises:
        RuntimeError: If the compiler refuses; the message has its words.
        OSError: If there is no room for it, or it cannot be loaded.
    """
    texts = [file.read_text() for file in (source, *sorted(_FOLDER.glob("*.h")))]
    key = hashlib.sha256(repr((torch.__version__, machine(), _FLAGS, texts)).encode()).hexdigest()
    place = (key[:32], ".so", source.name)
    return load_or_make(place, lambda: _build(source, key[:32]), _loadable, source.name)


def native_function(source: Path, name: str, arguments: Sequence[Any]) -> Any:
    """Return a function of a source file; compiled code that is loaded later finds all of its functions.

    Raises:
        RuntimeError, OSError: As `native_library`.
    """
    # Compiled code looks for a function among all that the process knows.
    function: Any = getattr(ctypes.CDLL(str(native_library(source)), mode=ctypes.RTLD_GLOBAL), name)
    function.argtypes = tuple(arguments)
    return function


def _loadable(stored: StoredCode) -> Path:
    ctypes.CDLL(str(stored.path))
    return stored.path


def _build(source: Path, key: str) -> StoredCode:
    from torch._inductor.cpp_builder import get_cpp_compiler

    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=writable_folder(PROGRAMS)) as scratch:
        library = Path(scratch) / source.with_suffix(".so").name
        command = [
            get_cpp_compiler(),
            *_FLAGS,
            f"-I{home / 'include'}",
            f"-I{_FOLDER}",
            str(source),
            f"-L{home / 'lib'}",
            "-ltorch_cpu",
        ]
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{source.name} does not compile: {_first_error(done.stderr)}")
        return store_code(key, library, {})


def _first_error(words: str) -> str:
    lines = words.strip().splitlines() or ["the compiler says nothing"]
    return next((line for line in lines if "error" in line), lines[0])
