"""The alignment interface."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class Alignment(nn.Module, ABC):
    """A map of predicted states, fitted on predictions and the states that they were meant for.

    Args:
        size: Numbers per state.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @abstractmethod
    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        """Choose the map; row i of `true` is what row i of `predicted` was meant to be."""

    @abstractmethod
    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
        """The aligned states."""
