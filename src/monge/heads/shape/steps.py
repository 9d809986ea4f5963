"""The steps of a head as modules of tensors only, which a backend can compile."""

from jaxtyping import Float
from torch import Tensor, nn

from monge.heads.shape.head import ShapeHead


class FirstStep(nn.Module):
    """The first step, from the target's last state.

    Args:
        head: The head.
    """

    def __init__(self, head: ShapeHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, states: Float[Tensor, "nodes hidden"], known: Float[Tensor, "nodes hidden"]
    ) -> tuple[Float[Tensor, "nodes start"], Float[Tensor, "nodes hidden"]]:
        """The shared computation and the predicted state.

        `known` is the embedding of the token after the last state.
        """
        start = self.head.predictor.start(states, known)
        return start, self.head.step(1, start, states, known)


class LaterStep(nn.Module):
    """A later step, from a predicted state.

    Args:
        head: The head.
        number: The step, from 2.
    """

    def __init__(self, head: ShapeHead, number: int) -> None:
        super().__init__()
        self.head, self.number = head, number

    def forward(
        self,
        start: Float[Tensor, "nodes start"],
        previous: Float[Tensor, "nodes hidden"],
        last: Float[Tensor, "nodes hidden"],
    ) -> tuple[Float[Tensor, "nodes hidden"]]:
        """The predicted state, as `ShapeHead.step`."""
        return (self.head.step(self.number, start, previous, last),)
