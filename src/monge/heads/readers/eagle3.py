"""EAGLE-3 and EAGLE-3.1: hidden states of several layers, and a reduced vocabulary."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import nn

from monge.core.errors import OptionError
from monge.heads.readers.attention import GroupedAttention
from monge.heads.readers.base import ChainHead, Unembed, plain_names
from monge.heads.readers.decoder import DecoderLayer, windows
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import (
    GatedMlp,
    HeadOutputLayer,
    Nodes,
    Norm,
    Projection,
)
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source


class Eagle3Head(ChainHead):
    """A layer on [norm(e(x_{t+1})) ; norm(g_t)], where g_t fuses the target's early, middle and late states at x_t.

    The next step reads the prediction in place of g: before the last norm, or after it if
    `norm_output` is set. The output layer has `draft_vocab_size` tokens; draft token i is
    the target's token i + d2t[i].

    The configuration lists the fused states as indices of the hidden states of `transformers`,
    which are the *inputs* of the layers with these numbers; by default 2, L // 2 and L - 3 of L.
    The list [1, L // 2 - 1, L - 4] counts outputs instead and names the same three.

    Args:
        source: `fc.weight`, `layers.0.*` (published as `midlayer.*`), `norm.weight`,
            `lm_head.weight`, `d2t`, `t2d`, ...; a Llama-like configuration.

    Reference:
        Li et al., EAGLE-3, arXiv 2503.01840.
    """

    family: ClassVar[str] = "eagle3"

    def __init__(self, source: Source) -> None:
        hidden, vocab = source.hidden, source.number("vocab_size")
        target = source.number("target_hidden_size", default=hidden)
        super().__init__(target, vocab)
        self.ids = source.numbers("eagle_aux_hidden_state_layer_ids")
        has_fusion = source.flag("use_aux_hidden_state", default=True)
        self.num_fused = (len(self.ids) if self.ids else 3) if has_fusion else 1
        fused = self.num_fused * target
        self.width, self.fused_width = hidden, fused
        self.fc = Projection(source, "fc", hidden, fused) if has_fusion else None
        self.whole_norm, self.part_norms = None, None
        if "input_norm.weight" in source:
            self.whole_norm = Norm(source, "input_norm", fused)
        elif source.flag("norm_before_fc"):
            raise source.refuse(
                "norm_before_fc is set, and there is no input_norm.weight; fetch the file again"
            )
        if "fc_norm.0.weight" in source:
            self.part_norms = nn.ModuleList(
                Norm(source, f"fc_norm.{index}", target) for index in range(self.num_fused)
            )
        elif source.flag("fc_norm"):
            raise source.refuse(
                "fc_norm is set, and there is no fc_norm.0.weight; fetch the file again"
            )
        count = source.number("num_hidden_layers", default=1)
        self.state_norm = Norm(source, "layers.0.hidden_norm", hidden)
        self.token_norm = Norm(source, "layers.0.input_layernorm", hidden)
        self.decoder = nn.ModuleList(
            DecoderLayer(source, f"layers.{layer}", doubled=layer == 0, window=window)
            for layer, window in enumerate(windows(source, count))
        )
        self.norm = Norm(source, "norm", hidden)
        self.keeps_normed = source.flag("norm_before_residual")
        self.returns_normed = source.flag("norm_output")
        self.embedding = source.maybe("embed_tokens.weight", vocab, hidden)
        if self.embedding is None and hidden != target:
            raise source.refuse(
                f"the head is {hidden} wide and its target {target}, and it has "
                "no embeddings of its own"
            )
        self.output = HeadOutputLayer(source, hidden, vocab)
        named = source.number("draft_vocab_size", default=self.output.size)
        if named != self.output.size:
            raise source.refuse(
                f"draft_vocab_size is {named}, and lm_head.weight has {self.output.size} rows"
            )
        source.leave("verifier_norm.", "verifier_lm_head.")

    @property
    def is_traceable(self) -> bool:
        """True for a head of a single plain layer."""
        layer = self.decoder[0]
        assert isinstance(layer, DecoderLayer)
        is_plain = isinstance(layer.attention, GroupedAttention) and not layer.attention.is_gated
        return len(self.decoder) == 1 and is_plain and isinstance(layer.mlp, GatedMlp)

    @property
    def draft_ids(self) -> Int64[torch.Tensor, " some"] | None:
        return self.output.draft_ids

    def layers(self, num_layers: int) -> tuple[int, ...]:
        if self.fc is None:
            return (num_layers,)
        usual = (2, num_layers // 2, num_layers - 3)
        if self.ids is None and num_layers < 4:
            raise OptionError(
                f"head: this eagle3 head reads hidden states {list(usual)}; a target of "
                f"{num_layers} layers has none"
            )
        as_outputs = tuple(layer - 1 for layer in usual)
        return usual if self.ids is None or self.ids == as_outputs else self.ids

    def fuse(self, features: Nodes) -> Nodes:
        if self.whole_norm is not None:
            features = self.whole_norm(features)
        if self.part_norms is not None:
            parts = features.chunk(self.num_fused, dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=-1
            )
        return features if self.fc is None else self.fc(features)

    def advance(self, embeddings: Nodes, states: Nodes, slots: CacheSlots) -> Nodes:
        residual, read = self.enter(embeddings, states)
        values = self.decoder[0](residual, slots, 0, beside=read)
        for number in range(1, len(self.decoder)):
            values = self.decoder[number](values, slots, number)
        return self.norm(values) if self.returns_normed else values

    def logits(self, states: Nodes, unembed: Unembed) -> Float[torch.Tensor, "nodes some"]:
        del unembed
        return self.scores(states)

    def enter(self, embeddings: Nodes, states: Nodes) -> tuple[Nodes, Nodes]:
        """Inputs of the first layer's residual stream and of its attention."""
        normed = self.state_norm(states)
        read = torch.cat([self.token_norm(embeddings), normed], dim=-1)
        return normed if self.keeps_normed else states, read

    def scores(self, states: Nodes) -> Float[torch.Tensor, "nodes some"]:
        """Logits of predicted states."""
        return self.output(states if self.returns_normed else self.norm(states))


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is an EAGLE-3 head: a first layer with a norm for the state."""
    return "layers.0.hidden_norm.weight" in plain_names(checkpoint)


def read(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> Eagle3Head:
    """Read a head, by default with the settings of its `config.json`; see `load_head`."""
    if config is None:
        config = {**checkpoint.config, **(checkpoint.config.get("eagle_config") or {})}
    source = Source.of(checkpoint, plain_names(checkpoint), config)
    head = Eagle3Head(source)
    source.finish()
    return head
