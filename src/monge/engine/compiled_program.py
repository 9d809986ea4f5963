"""Machine code of exported programs: how it is made, and how it is run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import ExportedProgram

from monge.engine.compiled_store import StoredProgram, scratch_folder, store_program
from monge.engine.few_rows_code import load_few_rows, program_options

_OPTIONS: Final = {
    # Weights stay where they are and are handed over when a program is loaded.
    "aot_inductor.package_constants_in_so": False,
    # Between two products a step has a few thousand numbers: threads would take longer to start than to work.
    "cpp.threads": 1,
    **program_options(),
}

Run = Callable[[list[Tensor]], Sequence[Tensor]]
"""Runs a program: its inputs, flattened, to its outputs."""


def build_program(program: ExportedProgram, tensors: Mapping[str, Tensor], key: str) -> StoredProgram:
    """Compile and keep a program.

    Args:
        program: What was traced.
        tensors: Its weights and buffers by name, which are not kept.
        key: Its name.
    """
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        package = Path(scratch) / "program.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=_OPTIONS)
        made = {name: one for name, one in program.constants.items() if name not in tensors and isinstance(one, Tensor)}
        return store_program(key, package, made)


def load_program(stored: StoredProgram, tensors: Mapping[str, Tensor]) -> Run:
    """What runs a program with these weights and buffers, which it keeps for as long as it lives itself.

    Inputs must be contiguous: a program does not ask for strides.
    """
    load_few_rows()
    program: Any = torch._inductor.aoti_load_package(str(stored.path))
    known = {**tensors, **stored.constants}
    # The program has their addresses only.
    constants = {name: known[name].detach() for name in program.get_constant_fqns()}
    program.load_constants(constants, check_full_update=True, user_managed=True)
    return _Loaded(program.loader.run, constants)


class _Loaded:
    """A program beside the tensors whose addresses it has."""

    def __init__(self, run: Run, constants: Mapping[str, Tensor]) -> None:
        self._run, self._constants = run, constants

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        return self._run(inputs)
