"""A decoder layer of a transformer."""

from collections.abc import Sequence

from torch import Tensor, nn

from monge.heads.readers.attention import GroupedAttention, LatentAttention, Shape
from monge.heads.readers.experts import Experts
from monge.heads.readers.layers import GatedMlp, Nodes, Norm, activation
from monge.heads.readers.reading import Segment
from monge.heads.readers.rotary import Rotary
from monge.heads.readers.tensors import Settings, Tensors


class DecoderLayer(nn.Module):
    """Pre-norm attention and a feed-forward network with residual connections.

    The checkpoint decides between latent and grouped attention, and between experts and one network.

    Args:
        tensors: Tensors of the checkpoint.
        name: Prefix of its tensor names.
        settings: The head's configuration.
        doubled: Whether attention reads embedding and state concatenated.
        centred: Whether norm weights are stored minus 1.
        window: Size of the sliding window in tokens; `None` for full attention.
        may_lack_norm: Whether a checkpoint without the norm before attention is accepted.
    """

    def __init__(
        self,
        tensors: Tensors,
        name: str,
        settings: Settings,
        *,
        doubled: bool = False,
        centred: bool = False,
        window: int | None = None,
        may_lack_norm: bool = False,
    ) -> None:
        super().__init__()
        hidden, eps = settings.number("hidden_size"), settings.real("rms_norm_eps", 1e-6)
        has_first = not doubled and (
            not may_lack_norm or f"{name}.input_layernorm.weight" in tensors
        )
        self.first = (
            Norm(tensors, f"{name}.input_layernorm", hidden, eps, centred=centred)
            if has_first
            else None
        )
        self.second = Norm(
            tensors, f"{name}.post_attention_layernorm", hidden, eps, centred=centred
        )
        part = f"{name}.self_attn"
        tensors.leave(f"{part}.rotary_emb.")
        if f"{part}.kv_a_proj_with_mqa.weight" in tensors:
            self.attention: LatentAttention | GroupedAttention = LatentAttention(
                tensors, part, settings
            )
        else:
            shape = Shape.of(settings, doubled=doubled)
            rotary = Rotary(settings.config, shape.head_dim, settings.where)
            self.attention = GroupedAttention(
                tensors, part, shape, rotary, window=window, centred=centred
            )
        self.mlp = feed_forward(tensors, f"{name}.mlp", settings)

    def forward(
        self,
        values: Nodes,
        segments: Sequence[Segment],
        layer: int,
        *,
        beside: Tensor | None = None,
    ) -> Nodes:
        """Run the layer.

        Args:
            values: Input of the residual stream.
            segments: The texts of the nodes.
            layer: Index of the layer's KV cache.
            beside: Input of attention, if other than the normed values.
        """
        read = (
            beside if beside is not None else values if self.first is None else self.first(values)
        )
        values = values + self.attention(read, segments, layer)
        return values + self.mlp(self.second(values))


def feed_forward(tensors: Tensors, name: str, settings: Settings) -> GatedMlp | Experts:
    """A mixture of experts if the checkpoint has a router, else one network."""
    if f"{name}.gate.weight" in tensors:
        return Experts(tensors, name, settings)
    act = activation(str(settings.config.get("hidden_act", "silu")), settings.where)
    return GatedMlp(
        tensors, name, settings.number("hidden_size"), settings.number("intermediate_size"), act=act
    )


def windows(settings: Settings, count: int) -> list[int | None]:
    """Sliding window, or `None`, of every layer.

    Raises:
        ModelLoadError: If a layer type is unknown, or their number differs from the number of layers.
    """
    kinds = settings.config.get("layer_types") or ["full_attention"] * count
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != count:
        raise settings.refuse(
            f"{count} layers of kinds {sorted(set(map(str, kinds)))}; known: full_attention, "
            "sliding_attention"
        )
    return [
        settings.number("sliding_window") if kind == "sliding_attention" else None for kind in kinds
    ]
