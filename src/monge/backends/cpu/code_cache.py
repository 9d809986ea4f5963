"""Compiled code on disk: made once for a model, a machine and its libraries, checked whenever they are read."""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import OptionError
from monge.networks.adapters import plain_modules, plain_state
from monge.runtime.notices import notify, waiting

FOLDER_VARIABLE: Final = "MONGE_CACHE"
PROGRAMS, MODELS = "programs", "gguf"
"""Folders in the cache."""
_NOTES: Final = ".constants"
_NO_PART: Final = frozenset(
    {"_name_or_path", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Settings of a network that change no number; trainers change some of them."""
_NO_SETTINGS: Final = frozenset(
    {"training", "gradient_checkpointing", "forward", "max_seq_len_cached"}
)
"""Attributes of layers that come and go, and change no number of compiled code."""
_PLAIN: Final = (int, float, str, type(None))
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType)
_FAULTS: Final = (RuntimeError, OSError, LookupError, TypeError, ValueError, EOFError, PickleError)
_FORMAT: Final = 11  # raised whenever the traced step, its inputs or the files change

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCode:
    """Compiled code on disk.

    Attributes:
        path: The compiled package.
        constants: Tensors that the trace made, by name; weights are not stored.
    """

    path: Path
    constants: Mapping[str, Tensor]


def cache_folder() -> Path:
    """Return the folder of compiled code: `$MONGE_CACHE`, or `monge` in the user's cache folder.

    Raises:
        OptionError: If the user has no home.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "monge"
    except RuntimeError as error:
        raise OptionError(f"no cache folder: {error}; name one in {FOLDER_VARIABLE}") from error


def writable_folder(name: str) -> Path:
    """Return a folder in the cache, made if it is not there.

    Raises:
        OptionError: If it cannot be made or written to.
    """
    folder, reason = cache_folder() / name, "it is read-only"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError as error:
        reason = error.strerror or str(error)
    raise OptionError(
        f"cannot write to the cache folder {folder}: {reason}; name another one in {FOLDER_VARIABLE}"
    )


def code_key(module: torch.nn.Module, *facts: object) -> str:
    """Return the name of compiled code: equal for equal architectures, else different.

    Values of weights do not count, since code gets them when it is loaded, nor do adapters, which are
    merged then.

    Args:
        module: The network or small module.
        *facts: Whatever else the code depends on.
    """
    weights = [
        (name, str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in plain_state(module).items()
    ]
    known = (_FORMAT, torch.__version__, transformers.__version__, machine(), weights, *facts)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def network_facts(network: PreTrainedModel) -> tuple[object, ...]:
    """Return what a network's compiled code depends on: its settings, and its layers without adapters."""
    settings = {
        name: value for name, value in network.config.to_dict().items() if name not in _NO_PART
    }
    attention = str(network.config.get_text_config()._attn_implementation)
    layers = [(name, *layer_facts(child)) for name, child in plain_modules(network).items()]
    return json.dumps(settings, default=str), attention, layers


def module_facts(module: torch.nn.Module) -> list[tuple[object, ...]]:
    """Return `layer_facts` of the layers inside a module."""
    return [(name, *layer_facts(child)) for name, child in module.named_modules()]


def layer_facts(layer: torch.nn.Module) -> tuple[object, ...]:
    """Return the class of a layer, and the plain values and functions that a trace takes for constant.

    The settings of networks are those of `network_facts`.
    """
    held = {} if isinstance(layer, PreTrainedModel) else vars(layer)
    values = sorted(
        (name, value if isinstance(value, _PLAIN) else getattr(value, "__qualname__", ""))
        for name, value in held.items()
        if not name.startswith("_")
        and name not in _NO_SETTINGS
        and isinstance(value, (*_PLAIN, *_FUNCTIONS))
    )
    return type(layer).__module__, type(layer).__qualname__, values


def find_code(key: str, suffix: str, name: str) -> StoredCode | None:
    """Return the stored code, or `None`, with a message if its files cannot be used."""
    path, notes = _files(key, suffix)
    if not (path.exists() and notes.exists()):
        return None
    damage = f"{path.name} is damaged"
    try:
        stored = torch.load(notes, weights_only=True)
        if hashlib.sha256(path.read_bytes()).hexdigest() == stored["sha256"]:
            return StoredCode(path=path, constants=stored["constants"])
    except _FAULTS as error:
        damage = f"{notes.name} is unreadable ({type(error).__name__})"
    notify(f"the compiled code of {name} cannot be used: {damage}")
    _remove(path)
    return None


def store_code(key: str, package: Path, constants: Mapping[str, Tensor]) -> StoredCode:
    """Keep a package and the constants of its trace; an interrupted run leaves nothing that looks complete."""
    path, notes = _files(key, package.suffix)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / notes.name
        torch.save({"sha256": digest, "constants": dict(constants)}, written)
        package.replace(path)
        written.replace(notes)
    return StoredCode(path=path, constants=constants)


def load_or_make(
    place: tuple[str, str, str],
    make: Callable[[], StoredCode],
    load: Callable[[StoredCode], Loaded],
    what: str,
) -> Loaded:
    """Load the stored code, or compile it. Code that fails is deleted from disk.

    If several processes need it, the first compiles it, and the others wait.

    Args:
        place: Arguments of `find_code`.
        make: Compiles and stores it.
        load: Loads and checks it; raises an error if it fails.
        what: Name of the network, for messages, and how long compiling takes.

    Raises:
        Exception: What `load` raises for the new code.
    """
    code = find_code(*place)
    if code is not None:
        try:
            return load(code)
        except _FAULTS as error:
            _remove(code.path)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        notify(f"the compiled code of {what} is removed and compiled again: {reason}")
    with only_process(PROGRAMS, place[0], what):
        # One that failed may still be there, where files cannot be removed.
        new = (find_code(*place) if code is None else None) or make()
    try:
        return load(new)
    except _FAULTS:
        _remove(new.path)
        raise


@contextmanager
def only_process(folder: str, key: str, what: str) -> Iterator[None]:
    """Hold the lock of something in a folder of the cache; other processes wait for it here.

    The system releases the lock of a process that dies. Where it has no locks, nobody waits.

    Raises:
        OptionError: As `writable_folder`.
    """
    path = writable_folder(folder) / f"{key}.lock"
    with path.open("w") as file:
        with suppress(OSError, ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notify(f"another process makes {what}; waiting for it")
                with waiting(f"waiting for another process, which makes {what}"):
                    fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Whoever comes now finds what was made, or makes it beside those that waited.
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    for file in (path, path.with_suffix(_NOTES)):
        file.unlink(missing_ok=True)


def _files(key: str, suffix: str) -> tuple[Path, Path]:
    folder = cache_folder() / PROGRAMS
    return folder / f"{key}{suffix}", folder / f"{key}{_NOTES}"


def machine() -> str:
    """Return the facts that the compiler's choice of instructions depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return platform.machine() + next(
        (line for line in lines if line.lower().startswith(("flags", "features"))), ""
    )
