"""Building blocks of published heads.

A block is built from a `source` under a `name` of its own: a prefix of tensor names, or the name of a
tensor without `.weight`.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from monge.core.errors import ModelLoadError
from monge.heads.readers.source import Source

Nodes = Float[Tensor, "nodes _"]
"""One row a node; widths differ from use to use."""
Activation = Callable[[Tensor], Tensor]


def activation(source: Source) -> Activation:
    """Return the activation `hidden_act` by its name in `transformers`; `silu` by default.

    Raises:
        ModelLoadError: If the name is unknown.
    """
    name = str(source.config.get("hidden_act", "silu"))
    if name not in ACT2FN:
        raise source.refuse(f"activation {name!r} is not known to transformers")
    return ACT2FN[name]


class Projection(nn.Module):
    """A linear layer, with a bias if the checkpoint has it.

    Args:
        rows: Output width.
        columns: Input width.
    """

    is_linear_map: ClassVar = True  # backends may store the matrix in another form
    weight: Tensor
    bias: Tensor | None

    def __init__(self, source: Source, name: str, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", source.take(f"{name}.weight", rows, columns))
        self.register_buffer("bias", source.maybe(f"{name}.bias", rows))

    def forward(self, values: Float[Tensor, "*nodes columns"]) -> Float[Tensor, "*nodes rows"]:
        return functional.linear(values, self.weight, self.bias)


class Norm(nn.Module):
    """RMS normalisation over the last dimension, in float32 or wider.

    Args:
        size: Width.
        eps: Added to the mean square, part of the published networks' definition; `None` takes the
            configuration's.
        centred: Whether the weight is stored minus 1.
    """

    weight: Tensor

    def __init__(
        self,
        source: Source,
        name: str,
        size: int,
        eps: float | None = None,
        *,
        centred: bool = False,
    ) -> None:
        super().__init__()
        self.eps = source.real("rms_norm_eps", 1e-6) if eps is None else eps
        self.offset = 1.0 if centred else 0.0
        self.register_buffer("weight", source.take(f"{name}.weight", size))

    def forward(self, values: Float[Tensor, "*nodes width"]) -> Float[Tensor, "*nodes width"]:
        wide = values if values.dtype == torch.float64 else values.float()
        scaled = functional.rms_norm(wide, wide.shape[-1:], None, self.eps)
        if self.offset:
            return (scaled * (self.offset + self.weight.to(scaled.dtype))).to(values.dtype)
        return self.weight * scaled.to(values.dtype)


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)).

    Args:
        inner: Inner width.
    """

    def __init__(self, source: Source, name: str, inner: int) -> None:
        super().__init__()
        hidden = source.hidden
        self.gate = Projection(source, f"{name}.gate_proj", inner, hidden)
        self.up = Projection(source, f"{name}.up_proj", inner, hidden)
        self.down = Projection(source, f"{name}.down_proj", hidden, inner)
        self.act = activation(source)

    def forward(self, values: Nodes) -> Nodes:
        return self.down(self.act(self.gate(values)) * self.up(values))


class HeadOutputLayer(nn.Module):
    """A head's own output layer, over the target's vocabulary or a reduced vocabulary.

    Args:
        source: `lm_head.weight`, and `d2t`, `t2d` for a draft vocabulary.
        hidden: Width of a state.
        vocab: The target's vocabulary size.

    Raises:
        ModelLoadError: If the draft vocabulary is inconsistent.
    """

    places: Tensor | None

    def __init__(self, source: Source, hidden: int, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.size = source.shape("lm_head.weight")[0]
        self.layer = Projection(source, "lm_head", self.size, hidden)
        places = _draft_vocabulary(source, self.size, vocab)
        self.register_buffer("places", places)
        self.is_ascending = places is not None and bool((places.diff() > 0).all())

    @classmethod
    def maybe(cls, source: Source, hidden: int, vocab: int) -> "HeadOutputLayer | None":
        """The head's own output layer, or `None` if it has none."""
        return cls(source, hidden, vocab) if "lm_head.weight" in source else None

    @property
    def draft_ids(self) -> Int64[Tensor, " some"] | None:
        """Tokens of the logits, ascending; `None` for the whole vocabulary."""
        return self.places if self.is_ascending else None

    def forward(self, states: Nodes) -> Float[Tensor, "nodes some"]:
        logits = self.layer(states)
        return logits if self.is_ascending else self.widen(logits)

    def widen(self, logits: Float[Tensor, "nodes some"]) -> Float[Tensor, "nodes vocab"]:
        """Return logits over the target's vocabulary, minus infinity outside the draft vocabulary."""
        if self.places is None:
            return logits
        full = logits.new_full((len(logits), self.vocab), -torch.inf)
        return full.index_copy(1, self.places, logits)


def _draft_vocabulary(source: Source, size: int, vocab: int) -> Int64[Tensor, " some"] | None:
    """The target's token of every draft token, `draft + d2t[draft]`; `None` if the vocabularies are equal."""
    where = repr(source.where)
    if "d2t" not in source:
        source.leave("t2d")
        if size != vocab:
            raise ModelLoadError(
                f"{where}: output layer over {size} of {vocab} tokens, and no d2t says over which"
            )
        return None
    places = source.take("d2t", size).long() + torch.arange(size)
    low, high, count = int(places.min()), int(places.max()), len(places.unique())
    if low < 0 or high >= vocab or count < size:
        raise ModelLoadError(
            f"{where}: d2t maps {size} draft tokens to {count} tokens between {low} and {high}; "
            f"expected as many different ones below {vocab}"
        )
    marks = source.maybe("t2d", vocab)
    if marks is not None and not torch.equal(marks.bool().nonzero()[:, 0], places.sort().values):
        raise ModelLoadError(f"{where}: d2t and t2d name different tokens; fetch the file again")
    return places
