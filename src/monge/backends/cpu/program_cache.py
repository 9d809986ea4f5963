"""Compiled programs on disk: made once for a model, a machine and its libraries, checked whenever they are read."""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from monge.engine.models.forward_program import ProgramSpec

FOLDER_VARIABLE: Final = "MONGE_CACHE"
_FORMAT: Final = 7  # raised whenever the traced step, its inputs or the files change


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram:
    """Return the path of a program.

    Attributes:
        path: The compiled package, or the graph.
        constants: Tensors that the trace made, by name; weights are not stored.
    """

    path: Path
    constants: Mapping[str, Tensor]


def cache_folder() -> Path:
    """Return the folder of programs: `$MONGE_CACHE`, or `monge` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "monge"


def program_key(network: PreTrainedModel, spec: ProgramSpec, *versions: str) -> str:
    """Name of the program of a network.

    Equal for equal architectures and different wherever the machine code could be.

    Values of weights do not count, since a program gets them when it is loaded.

    Args:
        network: The network.
        spec: Inputs of its step.
        *versions: What else made the program.
    """
    tensors = [
        (name, str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in network.state_dict().items()
    ]
    parts = (
        _FORMAT,
        torch.__version__,
        transformers.__version__,
        machine(),
        type(network).__module__,
        type(network).__qualname__,
        _settings(network),
        str(network.config.get_text_config()._attn_implementation),
        spec,
        tensors,
        *versions,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def module_key(module: torch.nn.Module, like: Sequence[Tensor], *versions: str) -> str:
    """Name of the program of a small module; as `program_key`, values of weights do not count.

    Args:
        module: The module; what its modules keep as plain values counts.
        like: Its inputs.
        *versions: What else made the program.
    """
    parts = (
        torch.__version__,
        transformers.__version__,
        machine(),
        [
            (name, type(one).__module__, type(one).__qualname__, _plain_values(one))
            for name, one in module.named_modules()
        ],
        [
            (name, str(tensor.dtype), tuple(tensor.shape))
            for name, tensor in module.state_dict().items()
        ],
        [(str(tensor.dtype), tensor.shape[1]) for tensor in like],
        *versions,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def find_program(key: str, suffix: str) -> tuple[StoredProgram | None, str | None]:
    """The stored program, or `None` and, where there are files that cannot be used, what is wrong with them."""
    path, notes = _files(key, suffix)
    if not (path.exists() and notes.exists()):
        return None, None
    try:
        found = torch.load(notes, weights_only=True)
        digest, constants = found["sha256"], found["constants"]
    except (
        OSError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        _unpickling_error(),
    ) as error:
        return None, f"{notes.name} is unreadable ({type(error).__name__})"
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return None, f"{path.name} is damaged"
    return StoredProgram(path=path, constants=constants), None


def store_program(key: str, package: Path, constants: Mapping[str, Tensor]) -> StoredProgram:
    """Keep a package and the constants of its trace.

    A run that is interrupted leaves nothing that looks complete.
    """
    path, notes = _files(key, package.suffix)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / notes.name
        torch.save({"sha256": digest, "constants": dict(constants)}, written)
        package.replace(path)
        written.replace(notes)
    return StoredProgram(path=path, constants=constants)


def scratch_folder() -> Path:
    """An existing folder beside the programs, so that a finished one can be moved into place."""
    folder = cache_folder() / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _settings(network: PreTrainedModel) -> str:
    """The configuration without the place that it was read from.

    A copy of a folder holds the same architecture.
    """
    return json.dumps(
        {
            name: value
            for name, value in network.config.to_dict().items()
            if name != "_name_or_path"
        },
        default=str,
    )


def _plain_values(module: torch.nn.Module) -> list[tuple[str, object]]:
    """Return the values that a trace takes for constant."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None)
    )


def _files(key: str, suffix: str) -> tuple[Path, Path]:
    folder = cache_folder() / "programs"
    return folder / f"{key}{suffix}", folder / f"{key}.constants"


def machine() -> str:
    """Return the facts that the compiler's choice of instructions depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return platform.machine() + next(
        (line for line in lines if line.lower().startswith(("flags", "features"))), ""
    )


def _unpickling_error() -> type[Exception]:
    from pickle import UnpicklingError

    return UnpicklingError
