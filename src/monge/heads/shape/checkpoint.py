"""Heads on disk: `config.json` for the settings, `head.safetensors` for the numbers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from monge.core.errors import ModelLoadError, MongeError
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor, settings_of

FORMAT: Final = "monge.shape"
VERSION: Final = 1
CONFIG: Final = "config.json"
WEIGHTS: Final = "head.safetensors"


def save_head(
    head: ShapeHead,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a head.

    Args:
        head: The head.
        folder: Created if it does not exist.
        dtype: Type of the predictor's weights on disk; `None` keeps theirs. Parts fitted in
            closed form keep their type.
        about: Further entries of the configuration, such as training settings and figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()
    }
    if dtype is not None:
        tensors = {
            name: tensor.to(dtype) if name.startswith("predictor.") else tensor
            for name, tensor in tensors.items()
        }
    config = {
        "format": FORMAT,
        "version": VERSION,
        "target": asdict(head.sizes),
        "predictor": settings_of(head.predictor),
        "alignment": {"name": head.alignment_name, "subspace": head.subspace_size},
        "about": about or {},
    }
    # Weights first: a folder with a config is complete.
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_shape(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes a SHAPE head."""
    return config.get("format") == FORMAT


def built_in_head() -> Path:
    """Folder of the head of the built-in target."""
    return Path(str(files("monge"))) / "models" / "shape"


def load_head(folder: str | Path) -> ShapeHead:
    """Read a head, in float32.

    Raises:
        ModelLoadError: If a file is missing or corrupted, or tensors are missing, unexpected,
            misshapen or not finite.
    """
    path = Path(folder).expanduser()
    config = _config(path)
    try:
        sizes = TargetSizes(**config["target"])
        settings, alignment = dict(config["predictor"]), config["alignment"]
        predictor = make_predictor(settings.pop("kind"), sizes, **settings)
        head = ShapeHead(predictor, sizes, alignment["name"], alignment["subspace"])
    except (KeyError, TypeError, MongeError) as error:
        raise ModelLoadError(
            f"{path / CONFIG}: {type(error).__name__}: {error}; is it a head of this library?"
        ) from error
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"cannot read {str(path / WEIGHTS)!r}: {type(error).__name__}: {error}; fetch it again"
        ) from error
    _check_tensors(tensors, head, path / WEIGHTS)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head.eval()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(
            f"no shape head in {str(path)!r} ({type(error).__name__}: {error}); give a folder "
            "that `monge train shape` wrote"
        ) from error
    found = (
        (config.get("format"), config.get("version")) if isinstance(config, dict) else (None, None)
    )
    if found != (FORMAT, VERSION):
        raise ModelLoadError(
            f"{str(path / CONFIG)!r} has format {found[0]!r}, version {found[1]!r}; this library "
            f"reads {FORMAT!r}, "
            f"version {VERSION}"
        )
    return config


def _check_tensors(tensors: dict[str, torch.Tensor], head: ShapeHead, path: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    missing, surplus = (
        sorted(wanted.keys() - tensors.keys()),
        sorted(tensors.keys() - wanted.keys()),
    )
    if missing or surplus:
        raise ModelLoadError(
            f"{str(path)!r} does not fit its {CONFIG}: missing {missing}, superfluous {surplus}"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ModelLoadError(
                f"{str(path)!r}: {name} has shape {tuple(tensor.shape)}; "
                f"{CONFIG} asks for {wanted[name]}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(
                f"{str(path)!r}: {name} holds numbers that are not finite; train the head again"
            )
