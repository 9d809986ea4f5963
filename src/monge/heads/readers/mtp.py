"""Native multi-token-prediction modules, in the target's checkpoint or extracted from it."""

import re
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float

from monge.core.errors import ModelLoadError
from monge.heads.readers.base import ChainHead, Unembed
from monge.heads.readers.decoder import DecoderLayer
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source

_LAYERED: Final = re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$")
_PARTS: Final = {
    "mtp": ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0."),
    "mimo": ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", ""),
    "deepseek": ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", ""),
}
"""Tensor names after a layout's prefix: norm of the embedding, norm of the state, projection, last norm, layer."""
_NAMES: Final = ("embedding_norm.", "state_norm.", "projection.", "norm.", "layer.")
_CENTRED: Final = ("qwen3_next", "qwen3_5")


class MtpHead(ChainHead):
    """A decoder layer on a projection of embedding and state, a last norm, and the target's output layer.

    The layer reads proj([norm(e(x_{t+1})) ; norm(h_t)]).

    h_t is the input of the target's output layer. Deeper tokens apply the module again, to its own
    normed output. If a checkpoint has a module per depth, the first is used, with a warning.

    Args:
        source: Source with the names of `_NAMES`.
        state_first: Whether the projection reads the state before the embedding, as in MiMo.
        centred: Whether norm weights are stored minus 1, as in Qwen.

    Reference:
        DeepSeek-V3, arXiv 2412.19437, section 2.2. The order of the two inputs is that of the
        published weights, not of its equation 21.
    """

    family: ClassVar[str] = "mtp"

    def __init__(self, source: Source, *, state_first: bool, centred: bool) -> None:
        hidden = source.hidden
        super().__init__(hidden, source.number("vocab_size"))
        self.width = self.fused_width = hidden
        self.embedding_norm, self.state_norm, self.norm = (
            Norm(source, name, hidden, centred=centred)
            for name in ("embedding_norm", "state_norm", "norm")
        )
        self.projection = Projection(source, "projection", hidden, 2 * hidden)
        self.layer = DecoderLayer(source, "layer", centred=centred)
        self.state_first = state_first
        # Embeddings and output layer are the target's own, wherever they are stored once more.
        source.leave("layer.embed_tokens.", "layer.shared_head.head.")

    def advance(self, embeddings: Nodes, states: Nodes, slots: CacheSlots) -> Nodes:
        pair = [self.embedding_norm(embeddings), self.state_norm(states)]
        values = self.projection(torch.cat(pair[::-1] if self.state_first else pair, dim=-1))
        return self.norm(self.layer(values, slots, 0))

    def logits(self, states: Nodes, unembed: Unembed) -> Float[torch.Tensor, "nodes vocab"]:
        return unembed(states)


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has such a module.

    Its tensors decide, since some configurations declare missing modules.
    """
    return _layout(checkpoint) is not None


def is_alone(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint contains only such modules."""
    layout = _layout(checkpoint)
    return layout is not None and all(name.startswith(layout[1]) for name in checkpoint.shapes)


def read(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> MtpHead:
    """Read a head, by default with the settings of its `config.json`; see `load_head`."""
    where, layout = str(checkpoint.path), _layout(checkpoint)
    if layout is None:
        raise ModelLoadError(
            f"{where!r} has no tensors of a prediction module (mtp.*, model.mtp_layers.*, or a "
            "layer with eh_proj), whatever its configuration declares"
        )
    kind, prefix, num_modules = layout
    if num_modules > 1:
        warnings.warn(
            f"{where}: {num_modules} prediction modules; the first one is applied at every depth",
            stacklevel=2,
        )
    parts = {prefix + part: name for part, name in zip(_PARTS[kind], _NAMES, strict=True)}
    names: dict[str, str] = {}
    for name in checkpoint.shapes:
        if name.startswith(prefix):
            # The longest part that fits: the layer's own prefix begins every name of some layouts.
            part = max((part for part in parts if name.startswith(part)), key=len, default="")
            names[parts.get(part, "") + name.removeprefix(part)] = name
    text: Any = checkpoint.config.get("text_config")
    source = Source.of(checkpoint, names, config or text)
    source.leave(*(f"mtp.layers.{module}." for module in range(1, num_modules)))
    state_first = prefix.startswith("model.mtp_layers.")
    centred = str(source.config.get("model_type", "")).startswith(_CENTRED)
    head = MtpHead(source, state_first=state_first, centred=centred)
    source.finish()
    return head


def _layout(checkpoint: Checkpoint) -> tuple[str, str, int] | None:
    """The layout, the tensor prefix of the first module, and the number of modules."""
    names = checkpoint.shapes
    if "mtp.fc.weight" in names:
        modules = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
        return "mtp", "mtp.", len(modules)
    for prefix in ("model.mtp_layers.", "mtp_layers."):
        ends = [name for name in names if name.endswith(".input_proj.weight")]
        if f"{prefix}0.input_proj.weight" in ends:
            return "mimo", f"{prefix}0.", sum(name.startswith(prefix) for name in ends)
    layers = sorted(int(match[1]) for name in names if (match := _LAYERED.match(name)))
    return ("deepseek", f"model.layers.{layers[0]}.", len(layers)) if layers else None
