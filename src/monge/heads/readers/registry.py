"""The formats of heads, in the order in which they are tried, and `load_head`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from monge.core.errors import ModelLoadError
from monge.heads.readers import block, eagle, eagle3, hydra, medusa, mtp, speculators
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.files import Checkpoint, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A published format of heads.

    Args:
        name: Name of the format.
        sign: Description of what identifies it.
        recognises: Whether a folder is of this format.
        read: Its reader.
    """

    name: str
    sign: str
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], PublishedHead]


FORMATS: Final = (
    Format(
        name="speculators",
        sign="speculators_model_type in config.json",
        recognises=speculators.recognises,
        read=speculators.read,
    ),
    Format(name="medusa", sign="0.0.linear.weight", recognises=medusa.recognises, read=medusa.read),
    Format(
        name="hydra",
        sign="hydra_mlp.* or hydra_head_arch",
        recognises=hydra.recognises,
        read=hydra.read,
    ),
    Format(
        name="eagle3",
        sign="midlayer.hidden_norm.weight",
        recognises=eagle3.recognises,
        read=eagle3.read,
    ),
    Format(
        name="dflash",
        sign="hidden_norm.weight and fc.weight",
        recognises=block.recognises,
        read=block.read,
    ),
    Format(
        name="eagle",
        sign="fc.weight [d, 2d] and layers.0.*",
        recognises=eagle.recognises,
        read=eagle.read,
    ),
    Format(
        name="mtp",
        sign="mtp.fc.weight, eh_proj or mtp_layers.*",
        recognises=mtp.recognises,
        read=mtp.read,
    ),
)


def format_of(checkpoint: Checkpoint) -> Format | None:
    """The first format that matches a folder."""
    return next((one for one in FORMATS if one.recognises(checkpoint)), None)


def load_head(path: str | Path) -> PublishedHead:
    """Read a published head, on the CPU and in the type of its file.

    Args:
        path: Its folder, or the file of its tensors beside its `config.json`.

    Raises:
        ModelLoadError: If no format matches, or the checkpoint is broken, incomplete or
            inconsistent.
    """
    checkpoint = Checkpoint(path)
    found = format_of(checkpoint)
    if found is None:
        raise unknown_format(checkpoint)
    return found.read(checkpoint).eval()


def unknown_format(checkpoint: Checkpoint) -> ModelLoadError:
    """The error for a folder that no format matches."""
    signs = "; ".join(f"{one.name} ({one.sign})" for one in FORMATS)
    config = checkpoint.config
    return ModelLoadError(
        f"{str(checkpoint.path)!r} is no head that is read here: architectures "
        f"{config.get('architectures')}, model_type "
        f"{config.get('model_type')!r}, tensors {listed(checkpoint.shapes)}; formats read are "
        f"{signs}"
    )
