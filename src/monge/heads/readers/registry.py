"""The formats of heads, in the order in which they are tried, and `load_head`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from monge.core.errors import ModelLoadError
from monge.heads.readers import block, eagle3, mtp
from monge.heads.readers.base import PublishedHead, plain_names
from monge.heads.readers.files import Checkpoint, listed
from monge.heads.readers.source import Source

_TYPE: Final = "speculators_model_type"
_OUTER: Final = ("transformer_layer_config", "speculators_config", "architectures", "model_type")


def _read_speculators(checkpoint: Checkpoint) -> PublishedHead:
    """Read a head of the `speculators` library, whose configuration names the algorithm."""
    outer, where = checkpoint.config, str(checkpoint.path)
    algorithm = str(outer[_TYPE])
    if algorithm not in _ALGORITHMS:
        raise ModelLoadError(
            f"{where!r}: {_TYPE} is {algorithm!r}, which is not read here; read are "
            f"{', '.join(sorted(_ALGORITHMS))}"
        )
    inner = outer.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ModelLoadError(f"{where!r}: the configuration lacks transformer_layer_config")
    for method in (outer.get("speculators_config") or {}).get("proposal_methods") or []:
        tolerance, most = method.get("accept_tolerance", 0.0), method.get("verifier_accept_k", 1)
        if tolerance > 0 or most > 1:
            raise ModelLoadError(
                f"{where!r} asks for accept_tolerance {tolerance} and verifier_accept_k {most}, "
                "which change the text; set them to 0.0 and 1 in its configuration to use it "
                "losslessly"
            )
    config = {**inner, **{key: value for key, value in outer.items() if key not in _OUTER}}
    return _ALGORITHMS[algorithm](checkpoint, config)


def _read_block(checkpoint: Checkpoint, config: dict[str, Any]) -> PublishedHead:
    source = Source.of(checkpoint, plain_names(checkpoint), config)
    shifted = source.flag("sample_from_anchor", default=config[_TYPE] == "dspark")
    # This format counts hidden states, so its numbers need no shift.
    ids = source.numbers("aux_hidden_state_layer_ids")
    if ids is None:
        raise source.refuse("the configuration lacks aux_hidden_state_layer_ids")
    return block.build(source, ids, is_shifted=shifted, is_speculators=True)


_ALGORITHMS: Final[dict[str, Callable[[Checkpoint, dict[str, Any]], PublishedHead]]] = {
    "eagle3": eagle3.read,
    "mtp": mtp.read,
    "dflash": _read_block,
    "dspark": _read_block,
}


class Format(NamedTuple):
    """A published format of heads: its name, what identifies it, and the functions of its reader."""

    name: str
    sign: str
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], PublishedHead]


FORMATS: Final = (
    Format(
        "speculators",
        "speculators_model_type in config.json",
        lambda checkpoint: _TYPE in checkpoint.config,
        _read_speculators,
    ),
    *(
        Format(name, sign, reader.recognises, reader.read)
        for name, sign, reader in (
            ("eagle3", "midlayer.hidden_norm.weight", eagle3),
            ("dflash", "hidden_norm.weight and fc.weight", block),
            ("mtp", "mtp.fc.weight, eh_proj or mtp_layers.*", mtp),
        )
    ),
)


def format_of(checkpoint: Checkpoint) -> Format | None:
    """Return the first format that matches a folder."""
    return next(
        (head_format for head_format in FORMATS if head_format.recognises(checkpoint)), None
    )


def load_head(path: str | Path) -> PublishedHead:
    """Read a published head, on the CPU and in the type of its file.

    Args:
        path: Its folder, or the file of its tensors beside its `config.json`.

    Raises:
        ModelLoadError: If no format matches, the method is not supported, the head asks for a lossy
            verification, or settings or tensors are missing, unexpected, misshapen or inconsistent.
    """
    checkpoint = Checkpoint(path)
    head_format = format_of(checkpoint)
    if head_format is None:
        raise unknown_format(checkpoint)
    return head_format.read(checkpoint).eval()


def unknown_format(checkpoint: Checkpoint) -> ModelLoadError:
    """Return the error for a folder that no format matches."""
    signs = "; ".join(f"{head_format.name} ({head_format.sign})" for head_format in FORMATS)
    config = checkpoint.config
    return ModelLoadError(
        f"{str(checkpoint.path)!r} is no head that is read here: architectures "
        f"{config.get('architectures')}, model_type "
        f"{config.get('model_type')!r}, tensors {listed(checkpoint.shapes)}; formats read are "
        f"{signs}"
    )
