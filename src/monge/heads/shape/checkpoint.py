"""Heads on disk: `config.json` for the settings, `head.safetensors` for the numbers."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from monge.core.errors import ModelLoadError, MongeError
from monge.heads.readers.files import CONFIG, Checkpoint, read_json
from monge.heads.readers.source import Source
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor

FORMAT: Final = "monge.shape"
VERSION: Final = 1
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
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        kind = dtype if name.startswith("predictor.") else None
        tensors[name] = tensor.detach().to("cpu", kind).contiguous()
    config = {
        "format": FORMAT,
        "version": VERSION,
        "target": asdict(head.sizes),
        "predictor": head.predictor.settings,
        "alignment": {"name": head.alignment_name, "subspace": head.subspace_size},
        "about": about or {},
    }
    # Weights first: a folder with a config is complete.
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_shape(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes a SHAPE head."""
    return config.get("format") == FORMAT


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
    checkpoint = Checkpoint(path)
    tensors = Source.of(checkpoint)
    state = {
        name: tensors.take(name, *tensor.shape).float()
        for name, tensor in head.state_dict().items()
    }
    tensors.finish()
    head.load_state_dict(state)
    return head.eval()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path / CONFIG)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"no shape head in {str(path)!r} ({error}); give a folder that `monge train shape` wrote"
        ) from error
    kind, version = (config.get(key) for key in ("format", "version"))
    if (kind, version) != (FORMAT, VERSION):
        raise ModelLoadError(
            f"{str(path / CONFIG)!r} has format {kind!r}, version {version!r}; this library reads "
            f"{FORMAT!r}, version {VERSION}"
        )
    return config
