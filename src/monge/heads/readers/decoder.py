"""A decoder layer of a transformer.

Layers of published heads are not those of any single model: EAGLE-3 attends to embedding and state
side by side, and block drafters project keys of a context that they do not transform. Backends
compile what comes before attention apart from what comes after it. So the layer is written out
here, and only mixtures of experts are those of `transformers`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from monge.heads.readers.attention import GroupedAttention, LatentAttention
from monge.heads.readers.layers import GatedMlp, Nodes, Norm, activation
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source


class DecoderLayer(nn.Module):
    """Pre-norm attention and a feed-forward network with residual connections.

    The checkpoint decides between latent and grouped attention, and between experts and a single
    network.

    Args:
        doubled: Whether attention reads embedding and state concatenated.
        centred: Whether norm weights are stored minus 1.
        window: Size of the sliding window in tokens; `None` for full attention.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        *,
        doubled: bool = False,
        centred: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        first, second = (f"{name}.{part}_layernorm" for part in ("input", "post_attention"))
        hidden = source.hidden
        self.first = None if doubled else Norm(source, first, hidden, centred=centred)
        self.second = Norm(source, second, hidden, centred=centred)
        part = f"{name}.self_attn"
        source.leave(f"{part}.rotary_emb.")
        self.attention: LatentAttention | GroupedAttention
        if f"{part}.kv_a_proj_with_mqa.weight" in source:
            self.attention = LatentAttention(source, part)
        else:
            kind = {"doubled": doubled, "window": window, "centred": centred}
            self.attention = GroupedAttention(source, part, **kind)
        self.mlp = feed_forward(source, f"{name}.mlp")

    def forward(
        self,
        values: Nodes,
        slots: CacheSlots,
        layer: int,
        *,
        beside: Tensor | None = None,
    ) -> Nodes:
        """Run the layer with its KV cache; `beside` is the input of attention, if other than the normed values."""
        if beside is None:
            beside = values if self.first is None else self.first(values)
        values = values + self.attention(beside, slots, layer)
        return values + self.mlp(self.second(values))


class Experts(nn.Module):
    """A mixture of routed experts, and experts shared by all tokens, as `transformers` computes it.

    With `gate.e_score_correction_bias` the mixture is DeepSeek-V3's, otherwise Qwen's. Experts are
    stored separately, or all in one tensor.
    """

    def __init__(self, source: Source, name: str) -> None:
        super().__init__()
        inner = source.number("moe_intermediate_size")
        count = source.number("n_routed_experts", "num_experts", "num_local_experts")
        common: dict[str, Any] = {
            "hidden_size": source.hidden,
            "moe_intermediate_size": inner,
            "num_experts_per_tok": source.number("num_experts_per_tok"),
            "norm_topk_prob": source.flag("norm_topk_prob", default=True),
            "hidden_act": str(source.config.get("hidden_act", "silu")),
            "experts_implementation": "eager",
        }
        activation(source)  # refuses one that is unknown
        with torch.device("meta"):
            if f"{name}.gate.e_score_correction_bias" in source:
                config = DeepseekV3Config(
                    **common,
                    n_routed_experts=count,
                    n_shared_experts=source.number("n_shared_experts", default=1),
                    n_group=source.number("n_group", default=1),
                    topk_group=source.number("topk_group", default=1),
                    routed_scaling_factor=source.real("routed_scaling_factor", 1.0),
                )
                self.block: nn.Module = DeepseekV3MoE(config)
            elif f"{name}.shared_expert_gate.weight" in source:
                shared = source.number("shared_expert_intermediate_size", default=inner)
                common |= {"shared_expert_intermediate_size": shared}
                self.block = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**common, num_experts=count))
            else:
                self.block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**common, num_experts=count))
        weights = {
            part: _expert_weights(source, f"{name}.{part}", tuple(like.shape))
            for part, like in self.block.state_dict().items()
        }
        self.block.load_state_dict(weights, assign=True)
        self.block.requires_grad_(requires_grad=False)

    def forward(self, values: Nodes) -> Nodes:
        return self.block(values[None])[0]


def _expert_weights(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor, or the stack of the experts' own."""
    if name in source or len(shape) < 3:
        return source.take(name, *shape)
    (count, rows, columns), (prefix, _, part) = shape, name.rpartition(".")
    halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    size = rows // len(halves)
    return torch.stack(
        [
            torch.cat(
                [source.take(f"{prefix}.{expert}.{half}.weight", size, columns) for half in halves]
            )
            for expert in range(count)
        ]
    )


def feed_forward(source: Source, name: str) -> GatedMlp | Experts:
    """Return a mixture of experts if the checkpoint has a router, else a single network."""
    if f"{name}.gate.weight" in source:
        return Experts(source, name)
    return GatedMlp(source, name, source.number("intermediate_size"))


def windows(source: Source, count: int) -> list[int | None]:
    """Return the sliding window, or `None`, of every layer.

    Raises:
        ModelLoadError: If a layer type is unknown, or their number differs from the number of layers.
    """
    kinds = source.config.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count or not {"full_attention", "sliding_attention"}.issuperset(
        map(str, kinds)
    ):
        raise source.refuse(
            f"{count} layers of kinds {sorted(set(map(str, kinds)))}; known: full_attention, "
            "sliding_attention"
        )
    return [
        source.number("sliding_window") if kind == "sliding_attention" else None for kind in kinds
    ]
