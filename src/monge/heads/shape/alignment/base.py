"""The alignment interface."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class Alignment(nn.Module, ABC):
    """A map of predicted states, fitted on pairs of predicted and true states.

    Args:
        size: Width of a state.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @abstractmethod
    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        """Fit the map; row i of `predicted` predicts row i of `true`."""

    @abstractmethod
    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
        """The aligned states."""
