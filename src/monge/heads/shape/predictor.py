"""Predictors of future hidden states.

At position t, the inputs are the hidden state h_t and the token x_{t+1} that was drawn from it. Step
n predicts h_{t+n}, which the target's output layer maps to the law of x_{t+1+n}.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from monge.core.errors import OptionError


class StepPredictor(nn.Module, ABC):
    """Predicts step by step, each from the previous one.

    Args:
        hidden_size: Width of the target's hidden states.
        num_steps: Number of steps.
        is_branched: Whether a step also reads the last drafted token of its branch. Otherwise all
            nodes of one depth share one law.
    """

    def __init__(self, hidden_size: int, num_steps: int, is_branched: bool) -> None:
        super().__init__()
        if num_steps < 1:
            raise OptionError(f"shape: num_steps must be at least 1; got {num_steps}")
        self.hidden_size, self.num_steps, self.is_branched = hidden_size, num_steps, is_branched

    @abstractmethod
    def start(
        self, states: Float[Tensor, "nodes hidden"], known: Float[Tensor, "nodes hidden"]
    ) -> Float[Tensor, "nodes start"]:
        """Computation shared by all steps of a text, from h_t and the embedding of x_{t+1}."""

    @abstractmethod
    def step(
        self,
        number: int,
        start: Float[Tensor, "nodes start"],
        previous: Float[Tensor, "nodes hidden"],
        last: Float[Tensor, "nodes hidden"],
    ) -> Float[Tensor, "nodes hidden"]:
        """The state of step `number` (from 1), from the previous state and the embedding of the branch's last token."""


def rms_norm(states: Float[Tensor, "nodes hidden"]) -> Float[Tensor, "nodes hidden"]:
    """Every row divided by its root mean square, in float32 or better.

    A row of zeros stays zero.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    scale = wide.square().mean(dim=-1, keepdim=True).sqrt()
    return torch.where(scale > 0, wide / scale, 0.0).to(states.dtype)
