"""A decoder layer of a transformer."""

from collections.abc import Sequence

from torch import Tensor, nn

from monge.heads.readers.attention import GroupedAttention, LatentAttention
from monge.heads.readers.experts import Experts
from monge.heads.readers.layers import GatedMlp, Nodes, Norm, activation
from monge.heads.readers.reading import Segment
from monge.heads.readers.tensors import Settings, Tensors


class DecoderLayer(nn.Module):
    """Pre-norm attention and a feed-forward network with residual connections.

    The checkpoint decides between latent and grouped attention, and between experts and one network.

    Args:
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
        first, second = (f"{name}.{part}_layernorm" for part in ("input", "post_attention"))
        lacks_norm = doubled or (may_lack_norm and f"{first}.weight" not in tensors)
        hidden, eps = settings.hidden, settings.eps
        self.first = None if lacks_norm else Norm(tensors, first, hidden, eps, centred=centred)
        self.second = Norm(tensors, second, hidden, eps, centred=centred)
        part = f"{name}.self_attn"
        tensors.leave(f"{part}.rotary_emb.")
        self.attention: LatentAttention | GroupedAttention
        if f"{part}.kv_a_proj_with_mqa.weight" in tensors:
            self.attention = LatentAttention(tensors, part, settings)
        else:
            kind = {"doubled": doubled, "window": window, "centred": centred}
            self.attention = GroupedAttention(tensors, part, settings, **kind)
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
        if beside is None:
            beside = values if self.first is None else self.first(values)
        values = values + self.attention(beside, segments, layer)
        return values + self.mlp(self.second(values))


def feed_forward(tensors: Tensors, name: str, settings: Settings) -> GatedMlp | Experts:
    """Return a mixture of experts if the checkpoint has a router, else one network."""
    if f"{name}.gate.weight" in tensors:
        return Experts(tensors, name, settings)
    inner = settings.number("intermediate_size")
    return GatedMlp(tensors, name, settings.hidden, inner, act=activation(settings))


def windows(settings: Settings, count: int) -> list[int | None]:
    """Return the sliding window, or `None`, of every layer.

    Raises:
        ModelLoadError: If a layer type is unknown, or their number differs from the number of layers.
    """
    kinds = settings.config.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count or not {"full_attention", "sliding_attention"}.issuperset(
        map(str, kinds)
    ):
        raise settings.refuse(
            f"{count} layers of kinds {sorted(set(map(str, kinds)))}; known: full_attention, "
            "sliding_attention"
        )
    return [
        settings.number("sliding_window") if kind == "sliding_attention" else None for kind in kinds
    ]
