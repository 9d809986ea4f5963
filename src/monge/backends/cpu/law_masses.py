"""The machine code of laws that are known by scores; see `monge.laws.lazy_laws`."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from monge.backends.cpu.native_library import native_library
from monge.laws.lazy_laws import SIGNATURES, install

_SOURCE = Path(__file__).with_name("law_masses.cpp")


def load_law_masses() -> None:
    """Compute the masses of laws by machine code from now on, in this process.

    Raises:
        RuntimeError, OSError: As `native_library`.
    """
    install(_kernels())


@cache
def _kernels() -> dict[str, Any]:
    library = ctypes.CDLL(str(native_library(_SOURCE)))
    kernels = {}
    for name, (result, arguments) in SIGNATURES.items():
        kernels[name] = kernel = getattr(library, f"monge_{name}")
        kernel.restype, kernel.argtypes = result, arguments
    return kernels
