"""A step of a head of one layer in two parts, between which attention reads the text.

Each part takes matrices with one row a node, so that a backend can run it as one program: between
products of a few rows, an eager step spends most of its time on starting operations.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from monge.heads.readers.attention import GroupedAttention
from monge.heads.readers.decoder import DecoderLayer
from monge.heads.readers.layers import GatedMlp, Nodes


class SplitHead(nn.Module, ABC):
    """A head whose step may be one layer."""

    @property
    @abstractmethod
    def only_layer(self) -> DecoderLayer | None:
        """Its layer; `None` where it has several."""

    @abstractmethod
    def enter(self, embeddings: Nodes, states: Nodes) -> tuple[Nodes, Nodes]:
        """What the layer's residual starts from, and what its attention reads."""

    @abstractmethod
    def leave(self, values: Nodes) -> Nodes:
        """The state that the layer's result is."""

    @abstractmethod
    def scores(self, states: Nodes) -> Nodes:
        """Logits of the head's own output layer."""


def split_layer(head: nn.Module) -> DecoderLayer | None:
    """The layer of a head whose step can be split; `None` for any other head."""
    layer = head.only_layer if isinstance(head, SplitHead) else None
    is_plain = (
        layer is not None
        and isinstance(layer.attention, GroupedAttention)
        and not layer.attention.is_gated
        and isinstance(layer.mlp, GatedMlp)
    )
    return layer if is_plain else None


class BeforeAttention(nn.Module):
    """From embeddings, states, cosines and sines to residual, queries, keys and values.

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
    """From residual and what attention read to the next state and its logits.

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
