"""A step of a one-layer head as two programs, before and after attention.

Each part maps matrices with one row per node, so a backend can compile it. With few rows, an eager
step spends most of its time launching operations.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from monge.heads.readers.attention import GroupedAttention
from monge.heads.readers.decoder import DecoderLayer
from monge.heads.readers.layers import GatedMlp, Nodes


class SplitHead(nn.Module, ABC):
    """A head whose step can be split."""

    @property
    @abstractmethod
    def only_layer(self) -> DecoderLayer | None:
        """The layer, or `None` if there are several."""

    @abstractmethod
    def enter(self, embeddings: Nodes, states: Nodes) -> tuple[Nodes, Nodes]:
        """Inputs of the layer's residual stream and of its attention."""

    @abstractmethod
    def leave(self, values: Nodes) -> Nodes:
        """The state, given the layer's output."""

    @abstractmethod
    def scores(self, states: Nodes) -> Nodes:
        """Logits of the head's own output layer, given the state."""


def split_layer(head: nn.Module) -> DecoderLayer | None:
    """The layer of a head whose step can be split, else `None`."""
    layer = head.only_layer if isinstance(head, SplitHead) else None
    is_plain = (
        layer is not None
        and isinstance(layer.attention, GroupedAttention)
        and not layer.attention.is_gated
        and isinstance(layer.mlp, GatedMlp)
    )
    return layer if is_plain else None


class BeforeAttention(nn.Module):
    """Maps embeddings, states, cosines and sines to residual, queries, keys and values.

    Args:
        head: The head.
        layer: Its layer, with a `GroupedAttention`.
    """

    def __init__(self, head: SplitHead, layer: DecoderLayer) -> None:
        super().__init__()
        assert isinstance(layer.attention, GroupedAttention)
        self.head, self.attention = head, layer.attention

    def forward(
        self, embeddings: Tensor, states: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        residual, read = self.head.enter(embeddings, states)
        queries, keys, values, _ = self.attention.turned(read, (cos[:, None], sin[:, None]))
        return residual, queries.flatten(1), keys.flatten(1), values.flatten(1)


class AfterAttention(nn.Module):
    """Maps residual and attention output to the next state and its logits.

    Args:
        head: The head.
        layer: Its layer.
    """

    def __init__(self, head: SplitHead, layer: DecoderLayer) -> None:
        super().__init__()
        assert isinstance(layer.attention, GroupedAttention)
        self.head, self.layer, self.attention = head, layer, layer.attention

    def forward(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, ...]:
        values = residual + self.attention.o_proj(mixed)
        states = self.head.leave(values + self.layer.mlp(self.layer.second(values)))
        return states, self.head.scores(states)
