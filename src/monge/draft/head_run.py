"""How a published head follows the texts of a batch, whatever kind it is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import FeatureModel, NodeBlock


@dataclass(frozen=True, slots=True)
class Pairs:
    """Committed tokens that the target has read, each with the token after it.

    Args:
        features: The target's watched states, side by side.
        token_ids: The tokens after them.
        positions: Places of the states in the text.
    """

    features: Float[Tensor, "nodes width"]
    token_ids: tuple[int, ...]
    positions: range

    def split(self, size: int) -> list["Pairs"]:
        """The same in parts."""
        starts = range(0, len(self.token_ids), size)
        return [
            Pairs(
                self.features[start : start + size],
                self.token_ids[start : start + size],
                self.positions[start : start + size],
            )
            for start in starts
        ]


class HeadRun(ABC):
    """A head at work: reads what is committed, and then level after level of a tree.

    Like the networks' caches it holds what it has read, by request.
    """

    @abstractmethod
    def open(self, request: int) -> None:
        """Start a text of which nothing is known."""

    @abstractmethod
    def close(self, request: int) -> None:
        """Forget a text."""

    @abstractmethod
    def knows(self, request: int) -> bool:
        """Whether a state of this text has been read, so that something can be drafted."""

    @abstractmethod
    def read(self, pairs: Mapping[int, Pairs]) -> None:
        """Read committed tokens, after all that were read before."""

    @abstractmethod
    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one some"]]:
        """Start a round: logits after the last committed token of every text, which `roots` names."""

    @abstractmethod
    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes some"]]:
        """Read a level: logits after each of its nodes."""

    @abstractmethod
    def end(self, requests: Sequence[int]) -> None:
        """Forget what was drafted in this round."""


class TargetEnds:
    """The target's embedding and output layer, in the type in which a head computes.

    Args:
        target: The target.
    """

    def __init__(self, target: FeatureModel) -> None:
        self._target = target
        kind = target.embed((0,))
        self.dtype, self.device = kind.dtype, kind.device

    def embed(self, token_ids: Sequence[int]) -> Float[Tensor, "nodes hidden"]:
        """The target's embeddings."""
        return self._target.embed(token_ids)

    def ids(self, token_ids: Sequence[int]) -> Tensor:
        """Tokens as a tensor beside the weights."""
        return torch.tensor(list(token_ids)).to(self.device, non_blocking=True)

    def unembed(self, states: Tensor) -> Tensor:
        """The target's logits of last states."""
        return self._target.unembed(states.to(self.dtype))
