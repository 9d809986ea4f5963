"""The formats of heads, in the order in which they are tried, and `load_head`."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from monge.core.errors import ModelLoadError
from monge.heads.readers import block, eagle, eagle3, hydra, medusa, mtp, speculators
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.files import Checkpoint, listed


class Format(NamedTuple):
    """A published format of heads: its name, what identifies it, and the functions of its reader."""

    name: str
    sign: str
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], PublishedHead]


FORMATS: Final = tuple(
    Format(name, sign, reader.recognises, reader.read)
    for name, sign, reader in (
        ("speculators", "speculators_model_type in config.json", speculators),
        ("medusa", "0.0.linear.weight", medusa),
        ("hydra", "hydra_mlp.* or hydra_head_arch", hydra),
        ("eagle3", "midlayer.hidden_norm.weight", eagle3),
        ("dflash", "hidden_norm.weight and fc.weight", block),
        ("eagle", "fc.weight [d, 2d] and layers.0.*", eagle),
        ("mtp", "mtp.fc.weight, eh_proj or mtp_layers.*", mtp),
    )
)


def format_of(checkpoint: Checkpoint) -> Format | None:
    """Return the first format that matches a folder."""
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
    """Return the error for a folder that no format matches."""
    signs = "; ".join(f"{one.name} ({one.sign})" for one in FORMATS)
    config = checkpoint.config
    return ModelLoadError(
        f"{str(checkpoint.path)!r} is no head that is read here: architectures "
        f"{config.get('architectures')}, model_type "
        f"{config.get('model_type')!r}, tensors {listed(checkpoint.shapes)}; formats read are "
        f"{signs}"
    )
