"""EAGLE-1 and EAGLE-2: one file format, since EAGLE-2 changed only the tree."""

from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import nn

from monge.heads.readers.base import ChainHead, Unembed, plain_names
from monge.heads.readers.decoder import DecoderLayer, windows
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import HeadOutputLayer, Nodes, Norm, Projection
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source


class EagleHead(ChainHead):
    """A decoder layer on fc([e(x_{t+1}) ; h_t]), whose output approximates h_{t+1}.

    h_t is the input of the target's output layer, which turns the prediction into the law of
    x_{t+2}. The first layer has no norm before its attention. Positions are those of h_t; only their
    differences matter.

    Args:
        source: `fc.*`, `layers.{i}.*`, and optionally `embed_tokens.weight`, `norm.weight`,
            `lm_head.weight`; a Llama-like configuration.

    Reference:
        Li et al., EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858.
    """

    family: ClassVar[str] = "eagle"

    def __init__(self, source: Source) -> None:
        hidden, vocab = source.hidden, source.number("vocab_size")
        super().__init__(hidden, vocab)
        self.width = self.fused_width = hidden
        self.fc = Projection(source, "fc", hidden, 2 * hidden)
        if source.config.get("bias") is True and self.fc.bias is None:
            raise source.refuse(
                "the configuration says bias=true, and there is no fc.bias; fetch the file again"
            )
        count = source.number("num_hidden_layers", default=1)
        self.decoder = nn.ModuleList(
            DecoderLayer(source, f"layers.{layer}", window=window, may_lack_norm=layer == 0)
            for layer, window in enumerate(windows(source, count))
        )
        self.embedding = source.maybe("embed_tokens.weight", vocab, hidden)
        # Norms that some retrained heads have; the published ones have none.
        self.before, self.after = (
            Norm(source, name, hidden) if f"{name}.weight" in source else nn.Identity()
            for name in ("embed_norm", "norm")
        )
        self.output = HeadOutputLayer.maybe(source, hidden, vocab)

    @property
    def draft_ids(self) -> Int64[torch.Tensor, " some"] | None:
        return None if self.output is None else self.output.draft_ids

    def advance(self, embeddings: Nodes, states: Nodes, slots: CacheSlots) -> Nodes:
        values = self.fc(torch.cat([self.before(embeddings), states], dim=-1))
        for number, layer in enumerate(self.decoder):
            values = layer(values, slots, number)
        return values

    def logits(self, states: Nodes, unembed: Unembed) -> Float[torch.Tensor, "nodes some"]:
        return (unembed if self.output is None else self.output)(self.after(states))


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is an EAGLE-1 or EAGLE-2 head: layers, and a matrix over embedding and state."""
    names = plain_names(checkpoint)
    shape = checkpoint.shapes[names["fc.weight"]] if "fc.weight" in names else ()
    is_pair = len(shape) == 2 and shape[1] == 2 * shape[0]
    others = {"layers.0.hidden_norm.weight", "hidden_norm.weight", "pre_fc_norm_hidden.weight"}
    has_layer = "layers.0.self_attn.q_proj.weight" in names
    return is_pair and has_layer and others.isdisjoint(names)


def read(checkpoint: Checkpoint) -> EagleHead:
    """Read one; see `load_head`."""
    source = Source.of(checkpoint, plain_names(checkpoint))
    head = EagleHead(source)
    source.finish()
    return head
