"""The interface of published heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor, nn

from monge.core.errors import OptionError
from monge.heads.readers.attention import GroupedAttention, LatentAttention
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes
from monge.heads.readers.slots import CacheSlots
from monge.networks.base import FeatureModel

Unembed = Callable[[Tensor], Tensor]
"""Maps the target's last hidden states to its logits."""


class PublishedHead(nn.Module, ABC):
    """A head in memory, and the targets that it fits.

    Args:
        hidden_size: Width of the target's hidden states.
        vocab_size: The target's vocabulary size; `None` if the file does not say.
        num_layers: The target's number of layers; `None` if the file does not say.
    """

    family: ClassVar[str]
    embedding: Tensor | None
    """The head's embeddings, if it has its own."""

    def __init__(
        self, hidden_size: int, vocab_size: int | None, num_layers: int | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("embedding", None)
        sizes = {"wide": hidden_size, "tokens": vocab_size, "layers": num_layers}
        self._sizes = {what: size for what, size in sizes.items() if size is not None}

    @property
    def max_depth(self) -> int | None:
        """Largest depth that it drafts; `None` without a limit."""
        return None

    @property
    def is_traceable(self) -> bool:
        """Return whether a backend may compile the head."""
        return False

    @property
    def attentions(self) -> list[GroupedAttention | LatentAttention]:
        """Layers with a KV cache."""
        parts = self.modules()
        return [part for part in parts if isinstance(part, GroupedAttention | LatentAttention)]

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the hidden states that the head reads; the last state by default.

        Raises:
            OptionError: If the target has too few layers.
        """
        return (num_layers,)

    def check(self, target: FeatureModel) -> None:
        """Check that the head fits a target.

        Raises:
            OptionError: If hidden size, vocabulary or number of layers differ.
        """
        advice = "use the head that was published for this target"
        sizes = (target.hidden_size, target.vocab_size, target.num_layers)
        target_sizes = dict(zip(("wide", "tokens", "layers"), sizes, strict=True))
        if target_sizes | self._sizes != target_sizes:
            expected, actual = (
                ", ".join(f"{size} {what}" for what, size in numbers.items())
                for numbers in (self._sizes, target_sizes)
            )
            raise OptionError(
                f"head: this {self.family} head is for a target with states {expected}; the target's "
                f"are {actual}; {advice}"
            )
        read = self.layers(target.num_layers)
        if any(not 0 <= layer <= target.num_layers for layer in read):
            raise OptionError(
                f"head: this {self.family} head reads hidden states {list(read)}; the target has 0 "
                f"to {target.num_layers}; {advice}"
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
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token of a text."""
        return sum(
            heads * size * part.o_proj.weight.element_size()
            for part in self.attentions
            for heads, size in part.cache_shapes
        )


class ChainHead(PublishedHead):
    """Predicts the next state from a state and the token after it, and continues from its own prediction.

    Attributes:
        width: Width of a predicted state.
        fused_width: Width of the target's watched states, side by side.
    """

    width: int
    fused_width: int

    def fuse(self, features: Nodes) -> Nodes:
        """Fuse the target's watched states into a single state."""
        return features

    @abstractmethod
    def advance(self, embeddings: Nodes, states: Nodes, slots: CacheSlots) -> Nodes:
        """Read a token per state and return the predicted states."""

    @abstractmethod
    def logits(self, states: Nodes, unembed: Unembed) -> Float[Tensor, "nodes some"]:
        """Return the logits of the next token over `draft_ids`, given predicted states."""


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Map names without the prefix `model.`, which some tools add, to the names in the files."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): name
        for name in checkpoint.shapes
    }
