"""The format of the `speculators` library: the configuration names the algorithm."""

from collections.abc import Callable
from typing import Any, Final

from monge.core.errors import ModelLoadError
from monge.heads.readers import block, eagle3, mtp
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.tensors import Settings

TYPE: Final = "speculators_model_type"
_OUTER: Final = ("transformer_layer_config", "speculators_config", "architectures", "model_type")


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether the configuration has the library's format."""
    return TYPE in checkpoint.config


def read(checkpoint: Checkpoint) -> PublishedHead:
    """Read a head of a supported algorithm.

    Raises:
        ModelLoadError: If the algorithm is not supported, the head asks for a lossy verification,
            or settings or tensors are missing, unexpected, misshapen or inconsistent.
    """
    outer, where = checkpoint.config, str(checkpoint.path)
    algorithm = str(outer[TYPE])
    if algorithm not in _READERS:
        raise ModelLoadError(
            f"{where!r}: {TYPE} is {algorithm!r}, which is not read here; read are "
            f"{', '.join(sorted(_READERS))}"
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
    return _READERS[algorithm](checkpoint, config)


def _block(checkpoint: Checkpoint, config: dict[str, Any]) -> PublishedHead:
    settings = Settings(config, str(checkpoint.path))
    shifted = settings.flag("sample_from_anchor", default=config[TYPE] == "dspark")
    # This format counts hidden states, so its numbers need no shift.
    ids = settings.numbers("aux_hidden_state_layer_ids")
    if ids is None:
        raise settings.refuse("the configuration lacks aux_hidden_state_layer_ids")
    return block.build(checkpoint, config, ids, is_shifted=shifted, is_speculators=True)


_READERS: Final[dict[str, Callable[[Checkpoint, dict[str, Any]], PublishedHead]]] = {
    "eagle3": eagle3.read,
    "mtp": mtp.read,
    "dflash": _block,
    "dspark": _block,
}
