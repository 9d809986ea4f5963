"""Control arm: no alignment."""

from jaxtyping import Float
from torch import Tensor

from monge.heads.shape.alignment.base import Alignment


class NoMap(Alignment):
    """Predictions stay as they are."""

    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        del predicted, true

    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
        return states
