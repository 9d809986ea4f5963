"""Folders of published heads: `config.json`, and tensors in safetensors or in torch's own format."""

import json
import pickle
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from monge.core.errors import ModelLoadError
from monge.core.parts import HEADS, built_in

CONFIG: Final = "config.json"
_INDICES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SAFE: Final = ".safetensors"
_OF_TRAINING: Final = "training.pt"
"""Checkpoint that `monge train` leaves beside a head."""
_TORCH: Final = (".bin", ".pt", ".pth")
_BROKEN: Final = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    KeyError,
    SafetensorError,
    pickle.UnpicklingError,
)


def head_path(source: str | Path) -> Path:
    """Return the folder of a head, given a name in `core.parts.HEADS` or a path."""
    if isinstance(source, str) and source in HEADS:
        return built_in(HEADS[source])
    return Path(source).expanduser()


class Checkpoint:
    """A folder with a configuration and tensors; tensors are read on demand.

    Files in torch's format are read as tensors only: a file that would run code is refused.

    Args:
        path: The folder, or a file of tensors in it.

    Raises:
        ModelLoadError: If there is no configuration, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = given = head_path(path)
        self._folder = given.parent if given.is_file() else given
        if self._folder != given and not (self._folder / CONFIG).is_file():
            raise ModelLoadError(
                f"{str(path)!r} has no {CONFIG} beside it; give the folder of a "
                "checkpoint, or of a head"
            )
        self.config: dict[str, Any] = read_json(self._folder / CONFIG)
        self._file_of: dict[str, Path] = {}
        self._loaded: dict[Path, dict[str, Tensor]] = {}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name.

        Raises:
            ModelLoadError: If there are no tensors, or a file is broken.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files:
            for name, shape in self._shapes(file):
                if name in shapes:
                    raise ModelLoadError(
                        f"{str(self.path)!r}: tensor {name!r} is in two files; keep one of them"
                    )
                shapes[name] = shape
                self._file_of[name] = file
        return shapes

    def _shapes(self, file: Path) -> list[tuple[str, tuple[int, ...]]]:
        try:
            if file.suffix == _SAFE:
                with safe_open(file, framework="pt") as opened:
                    return [
                        (name, tuple(opened.get_slice(name).get_shape()))
                        for name in opened.keys()  # noqa: SIM118
                    ]
            self._loaded[file] = loaded = _load(file)
        except _BROKEN as error:
            raise _broken(file, error) from error
        return [(name, tuple(tensor.shape)) for name, tensor in loaded.items()]

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of `shapes`, on the CPU.

        Raises:
            ModelLoadError: If its file is broken.
        """
        file = self._file_of[name]
        if file.suffix != _SAFE:
            return self._loaded[file][name]
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(name)
        except _BROKEN as error:
            raise _broken(file, error) from error

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        if self._folder != self.path:
            return (self.path,)
        for name in _INDICES:
            if (self._folder / name).is_file():
                shards = sorted(set(read_json(self._folder / name).get("weight_map", {}).values()))
                missing = [shard for shard in shards if not (self._folder / shard).is_file()]
                if missing or not shards:
                    raise ModelLoadError(
                        f"{str(self._folder / name)!r} names "
                        f"{missing or 'no files'}; fetch the folder again"
                    )
                return tuple(self._folder / shard for shard in shards)
        present = sorted(self._folder.iterdir())
        for suffixes in ((_SAFE,), _TORCH):
            weights = [
                file for file in present if file.suffix in suffixes and file.name != _OF_TRAINING
            ]
            if weights:
                return tuple(weights)
        if any(file.suffix == ".gguf" for file in present):
            raise ModelLoadError(
                f"{str(self.path)!r} holds GGUF files, which are not read here; "
                "fetch the safetensors version"
            )
        raise ModelLoadError(
            f"{str(self.path)!r} holds no tensors (*.safetensors, *.bin or "
            "*.pt); fetch the folder again"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelLoadError: If there is none.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(
            f"cannot read {str(path)!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(settings, dict):
        raise ModelLoadError(
            f"{str(path)!r} holds {type(settings).__name__}; expected an object of settings"
        )
    return settings


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return the first names, and the number of all."""
    every = sorted(names)
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown}, ... ({len(every)} in all)"


def _load(file: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        # About formats, and with advice to load code; what matters is raised.
        warnings.simplefilter("ignore")
        try:
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Torch's older format cannot be mapped.
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    parts = loaded if isinstance(loaded, dict) else {type(loaded).__name__: loaded}
    wrong = [key for key, value in parts.items() if not isinstance(value, Tensor)]
    if wrong or parts is not loaded:
        raise ValueError(
            f"expected tensors by name; got {type(loaded).__name__} with {str(wrong)[:40]}"
        )
    return loaded


def _broken(file: Path, error: Exception) -> ModelLoadError:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, pickle.UnpicklingError):
        reason = "it is broken or holds more than tensors"
    return ModelLoadError(f"cannot read {str(file)!r}: {reason}; fetch it again")
