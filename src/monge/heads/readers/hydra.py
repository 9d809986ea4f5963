"""Hydra heads: `hydra_lm_head.pt`."""

import re
from collections.abc import Sequence
from typing import ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from monge.heads.readers.base import ChainHead, StepHead, Unembed
from monge.heads.readers.decoder import DecoderLayer
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes, Norm, Projection, ResBlocks
from monge.heads.readers.reading import Segment
from monge.heads.readers.source import Source

_PREFIX: Final = "prefix_embeding_layer"  # spelt so in the published files
_HEAD_DIM: Final = 128
_LAYERS: Final = {"mlp": "", "prefix-mlp": f"{_PREFIX}.layers.0", "eagle-attn": "attn"}
"""Prefix of the decoder layer's tensor names, by architecture."""


class HydraHead(StepHead):
    """One small network per future token; grounded ones also read the tokens drafted before.

    With h_t the state after token x_t, head i (from 0) gives the law of x_{t+2+i} from [h_t,
    e(x_{t+1}), ..., e(x_{t+1+i})], e being the target's embedding. An optional prefix layer first attends over
    the states.

    Args:
        source: `hydra_mlp.*`, `hydra_lm_head.*` and optionally the prefix layer.

    Reference:
        Ankner et al., arXiv 2402.05109.
    """

    family: ClassVar[str] = "hydra"

    def __init__(self, source: Source) -> None:
        has_prefix = source.config["hydra_head_arch"] == "prefix-mlp"
        # Dropout between the blocks takes every other number in heads with a prefix layer.
        spread, first, outputs = (2, 1, ".1") if has_prefix else (1, 0, "")
        blocks = [spread * one + first for one in range(source.number("hydra_num_layers"))]
        vocab, hidden = source.shape(f"hydra_lm_head.0{outputs}.weight")
        super().__init__(hidden, vocab)
        heads = range(source.number("hydra_num_heads"))
        self.reads_tokens = grounded = source.flag("grounded_heads")
        self.offset = source.number("hidden_state_offset", default=0)
        self.networks = nn.ModuleList(
            ResBlocks(
                source,
                [f"hydra_mlp.{head}.{block}" for block in blocks],
                hidden,
                hidden * (head + 2) if grounded else hidden,
                narrowing=f"hydra_mlp.{head}.{first}.res_connection" if grounded else None,
            )
            for head in heads
        )
        self.outputs = nn.ModuleList(
            Projection(source, f"hydra_lm_head.{one}{outputs}", vocab, hidden) for one in heads
        )
        self.prefix = self.prefix_norm = None
        if has_prefix:
            self.prefix = DecoderLayer(source, f"{_PREFIX}.layers.0")
            self.prefix_norm = Norm(source, f"{_PREFIX}.norm", hidden)
        source.leave(f"{_PREFIX}.embed_tokens.", "input_embed_fn.")

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers - self.offset,)

    def read(self, states: Nodes, segments: Sequence[Segment]) -> Nodes:
        if self.prefix is None or self.prefix_norm is None:
            return states
        return self.prefix_norm(self.prefix(states, segments, 0))

    def step(self, index: int, values: Nodes) -> Float[Tensor, "nodes vocab"]:
        return self.outputs[index](self.networks[index](values))


class HydraChain(ChainHead):
    """Hydra's `eagle-attn`: one decoder layer on [e(x_{t+1}), h_t], read by the target's output layer.

    Args:
        source: `fc.*` and `attn.*`.

    Reference:
        Ankner et al., arXiv 2402.05109; Li et al., EAGLE, arXiv 2401.15077.
    """

    family: ClassVar[str] = "hydra"

    def __init__(self, source: Source) -> None:
        hidden = source.hidden
        super().__init__(hidden, None)
        self.offset = source.number("hidden_state_offset", default=0)
        self.fc = Projection(source, "fc", hidden, 2 * hidden)
        self.layer = DecoderLayer(source, "attn")
        source.leave("lm_head.", "input_embed_fn.")

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers - self.offset,)

    def advance(self, embeddings: Nodes, states: Nodes, segments: Sequence[Segment]) -> Nodes:
        return self.layer(self.fc(torch.cat([embeddings, states], dim=-1)), segments, 0)

    def logits(self, states: Nodes, unembed: Unembed) -> Float[Tensor, "nodes vocab"]:
        return unembed(states)


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is a Hydra head."""
    return "hydra_head_arch" in checkpoint.config or any(
        re.match(r"hydra_(mlp|lm_head)\.", name) for name in checkpoint.shapes
    )


def read(checkpoint: Checkpoint) -> HydraHead | HydraChain:
    """Read one.

    Published configurations lack the width of the attention heads; the published ones are 128 wide,
    as in their targets. `num_attention_heads` sets another width.
    """
    config = {"hydra_head_arch": "mlp", "hydra_num_layers": 1, **checkpoint.config}
    source = Source.of(checkpoint, config=config)
    arch = config["hydra_head_arch"]
    if arch not in _LAYERS:
        raise source.refuse(
            f"Hydra heads of architecture {arch!r} are not read here; read are "
            f"{', '.join(sorted(_LAYERS))}"
        )
    if layer := _LAYERS[arch]:
        inner, hidden = source.shape(f"{layer}.mlp.gate_proj.weight")
        heads = config.get("num_attention_heads", hidden // _HEAD_DIM)
        rows = source.shape(f"{layer}.self_attn.k_proj.weight")[0]
        usual = {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": rows // max(1, hidden // max(1, heads)),
        }
        source.config = {**usual, **config}
    kind = HydraChain if arch == "eagle-attn" else HydraHead
    head = kind(source)
    source.finish()
    return head
