"""EAGLE-1 and EAGLE-2: one file format, since EAGLE-2 changed only the tree."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import nn

from monge.heads.readers.base import ChainHead, Embedding, OutputLayer, Unembed
from monge.heads.readers.decoder import DecoderLayer, windows
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.reading import Segment
from monge.heads.readers.tensors import Settings, Tensors


class EagleHead(ChainHead):
    """A decoder layer on fc([e(x_{t+1}) ; h_t]), whose output approximates h_{t+1}.

    h_t is the input of the target's output layer, which turns the prediction into the law of
    x_{t+2}. The first layer has no norm before its attention. Positions are those of h_t; only their
    differences matter.

    Args:
        tensors: `fc.*`, `layers.{i}.*`, and optionally `embed_tokens.weight`, `norm.weight`,
            `lm_head.weight`.
        settings: A Llama-like configuration.

    Reference:
        Li et al., EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858.
    """

    family: ClassVar[str] = "eagle"

    def __init__(self, tensors: Tensors, settings: Settings) -> None:
        hidden, vocab = settings.number("hidden_size"), settings.number("vocab_size")
        super().__init__(hidden, vocab)
        self.fc = Projection(tensors, "fc", hidden, 2 * hidden)
        if settings.config.get("bias") is True and self.fc.bias is None:
            raise settings.refuse(
                "the configuration says bias=true, and there is no fc.bias; fetch the file again"
            )
        eps, count = (
            settings.real("rms_norm_eps", 1e-6),
            settings.number("num_hidden_layers", default=1),
        )
        kinds = windows(settings, count)
        self.decoder = nn.ModuleList(
            DecoderLayer(
                tensors, f"layers.{one}", settings, window=kinds[one], may_lack_norm=one == 0
            )
            for one in range(count)
        )
        self.embedding = (
            Embedding(tensors, "embed_tokens", vocab, hidden)
            if "embed_tokens.weight" in tensors
            else None
        )
        # Norms that some retrained heads have; the published ones have none.
        self.before, self.after = (
            Norm(tensors, name, hidden, eps) if f"{name}.weight" in tensors else None
            for name in ("embed_norm", "norm")
        )
        self.output = OutputLayer(tensors, hidden, vocab) if "lm_head.weight" in tensors else None

    @property
    def draft_ids(self) -> Int64[torch.Tensor, " some"] | None:
        return None if self.output is None else self.output.draft_ids

    def advance(self, embeddings: Nodes, states: Nodes, segments: Sequence[Segment]) -> Nodes:
        values = self.fc(
            torch.cat(
                [embeddings if self.before is None else self.before(embeddings), states], dim=-1
            )
        )
        for number, layer in enumerate(self.decoder):
            values = layer(values, segments, number)
        return values

    def logits(self, states: Nodes, unembed: Unembed) -> Float[torch.Tensor, "nodes some"]:
        states = states if self.after is None else self.after(states)
        return unembed(states) if self.output is None else self.output(states)


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Map names without the prefix `model.`, which some tools add, to the names in the files."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): name
        for name in checkpoint.shapes
    }


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is an EAGLE-1 or EAGLE-2 head: layers, and a matrix over embedding and state."""
    names = plain_names(checkpoint)
    shape = checkpoint.shapes[names["fc.weight"]] if "fc.weight" in names else ()
    is_pair = len(shape) == 2 and shape[1] == 2 * shape[0]
    others = ("layers.0.hidden_norm.weight", "hidden_norm.weight", "pre_fc_norm_hidden.weight")
    return (
        is_pair
        and "layers.0.self_attn.q_proj.weight" in names
        and not any(name in names for name in others)
    )


def read(checkpoint: Checkpoint) -> EagleHead:
    """Read one.

    Raises:
        ModelLoadError: If settings or tensors are missing, unexpected, misshapen or inconsistent.
    """
    tensors = Tensors(checkpoint, plain_names(checkpoint))
    head = EagleHead(tensors, Settings(checkpoint.config, str(checkpoint.path)))
    tensors.finish()
    return head
