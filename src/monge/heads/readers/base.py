"""The interface of published heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from monge.core.errors import ModelLoadError, OptionError
from monge.heads.readers.attention import GroupedAttention, LatentAttention
from monge.heads.readers.layers import Nodes, Projection
from monge.heads.readers.reading import Segment
from monge.heads.readers.tensors import Tensors
from monge.heads.target import TargetSizes

Unembed = Callable[[Tensor], Tensor]
"""Last hidden states of the target to its logits."""


class PublishedHead(nn.Module, ABC):
    """A head in memory, and the targets that it fits.

    Args:
        hidden_size: Width of the target's hidden states.
        vocab_size: The target's vocabulary size; `None` if the file does not say.
        num_layers: The target's number of layers; `None` if the file does not say.
    """

    family: ClassVar[str]

    def __init__(
        self, hidden_size: int, vocab_size: int | None, num_layers: int | None = None
    ) -> None:
        super().__init__()
        self.embedding: Embedding | None = None
        self.target_hidden, self.target_vocab, self.target_layers = (
            hidden_size,
            vocab_size,
            num_layers,
        )

    @property
    def max_depth(self) -> int | None:
        """Largest depth that it drafts; `None` without a limit."""
        return None

    @property
    def num_kept(self) -> int:
        """Number of layers with a KV cache."""
        return len(self._attentions)

    @property
    def _attentions(self) -> list[GroupedAttention | LatentAttention]:
        parts = self.modules()
        return [part for part in parts if isinstance(part, GroupedAttention | LatentAttention)]

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the hidden states that it reads; the last one unless said otherwise.

        Raises:
            OptionError: If the target has too few layers.
        """
        return (num_layers,)

    def embed(self, token_ids: Int64[Tensor, " nodes"]) -> Nodes | None:
        """Return the head's own embeddings; `None` if it uses the target's."""
        return None if self.embedding is None else self.embedding(token_ids)

    def check(self, sizes: TargetSizes) -> None:
        """Check that the head fits a target.

        Raises:
            OptionError: If hidden size, vocabulary or number of layers differ.
        """
        known = (self.target_hidden, self.target_vocab, self.target_layers)
        found = (sizes.hidden_size, sizes.vocab_size, sizes.num_layers)
        if any(wanted not in (None, has) for wanted, has in zip(known, found, strict=True)):
            words = [
                f"{value} {what}"
                for value, what in zip(known, ("wide", "tokens", "layers"), strict=True)
                if value
            ]
            raise OptionError(
                f"head: this {self.family} head is for a target with states {', '.join(words)}; "
                f"the target's are {found[0]} "
                f"wide, {found[1]} tokens, {found[2]} layers; use the head that was published for "
                "this target"
            )
        outside = [
            layer for layer in self.layers(sizes.num_layers) if not 0 <= layer <= sizes.num_layers
        ]
        if outside:
            raise OptionError(
                f"head: this {self.family} head reads hidden states "
                f"{list(self.layers(sizes.num_layers))}; the target has 0 to "
                f"{sizes.num_layers}; use the head that was published for this target"
            )

    @property
    def draft_ids(self) -> Int64[Tensor, " some"] | None:
        """Tokens of its logits, ascending; `None` for the target's whole vocabulary."""
        return None

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a text."""
        return sum(
            part.kept_per_token * part.o_proj.weight.element_size() for part in self._attentions
        )


class StepHead(PublishedHead):
    """Predicts each future token from the target's last state and, in some families, the tokens drafted before it."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of steps."""

    @property
    def max_depth(self) -> int | None:
        return self.num_steps

    @property
    @abstractmethod
    def reads_tokens(self) -> bool:
        """Whether a step reads the tokens before it."""

    def read(self, states: Nodes, segments: Sequence[Segment]) -> Nodes:
        """Transform the states of committed tokens for `step`."""
        del segments
        return states

    @abstractmethod
    def step(self, index: int, values: Nodes, unembed: Unembed) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of a step.

        Args:
            index: From 0, the token after the newest committed one.
            values: The last state, concatenated with the embeddings of the tokens since if the head
                reads tokens.
            unembed: The target's output layer.
        """


class ChainHead(PublishedHead):
    """Predicts the next state from a state and the token after it, and continues from its own prediction."""

    def fuse(self, features: Nodes) -> Nodes:
        """Fuse the target's watched states into one."""
        return features

    @abstractmethod
    def advance(self, embeddings: Nodes, states: Nodes, segments: Sequence[Segment]) -> Nodes:
        """Read one token per state and return the predicted states."""

    @abstractmethod
    def logits(self, states: Nodes, unembed: Unembed) -> Float[Tensor, "nodes some"]:
        """Return the logits of the next token over `draft_ids`, given predicted states."""


class Embedding(nn.Module):
    """Embeddings of tokens.

    Args:
        tensors: Tensors of the checkpoint.
        name: Tensor name, without `.weight`.
        count: Number of tokens.
        width: Width of an embedding.
    """

    weight: Tensor

    def __init__(self, tensors: Tensors, name: str, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", tensors.take(f"{name}.weight", count, width))

    def forward(self, token_ids: Int64[Tensor, " nodes"]) -> Nodes:
        return functional.embedding(token_ids.to(self.weight.device), self.weight)


class OutputLayer(nn.Module):
    """A head's own output layer, over the target's vocabulary or a reduced one.

    Args:
        tensors: `lm_head.weight`, and `d2t`, `t2d` for a draft vocabulary.
        hidden: Width of a state.
        vocab: The target's vocabulary size.

    Raises:
        ModelLoadError: If the draft vocabulary is inconsistent.
    """

    places: Tensor | None

    def __init__(self, tensors: Tensors, hidden: int, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.size = tensors.shape("lm_head.weight")[0]
        self.layer = Projection(tensors, "lm_head", self.size, hidden)
        places = draft_vocabulary(tensors, self.size, vocab)
        self.register_buffer("places", places)
        self.is_ascending = places is not None and bool((places.diff() > 0).all())

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
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy(
            1, self.places, logits
        )


def draft_vocabulary(tensors: Tensors, size: int, vocab: int) -> Int64[Tensor, " some"] | None:
    """Return the target's token of every draft token; `None` if the vocabularies are equal.

    A file stores offsets: the target's token is `draft + d2t[draft]`.

    Raises:
        ModelLoadError: If the offsets lead outside the target's vocabulary or twice to one token,
            or `t2d` says otherwise.
    """
    if "d2t" not in tensors:
        tensors.leave("t2d")
        if size != vocab:
            raise ModelLoadError(
                f"{tensors.where!r}: output layer over {size} of {vocab} tokens, "
                "and no d2t says over which"
            )
        return None
    places = tensors.take("d2t", size).long() + torch.arange(size)
    if int(places.min()) < 0 or int(places.max()) >= vocab or len(places.unique()) < size:
        raise ModelLoadError(
            f"{tensors.where!r}: d2t maps {size} draft tokens to {len(places.unique())} tokens "
            f"between {int(places.min())} and "
            f"{int(places.max())}; expected as many different ones below {vocab}"
        )
    marks = tensors.maybe("t2d", vocab)
    if marks is not None and not torch.equal(marks.bool().nonzero()[:, 0], places.sort().values):
        raise ModelLoadError(
            f"{tensors.where!r}: d2t and t2d name different tokens; fetch the file again"
        )
    return places
