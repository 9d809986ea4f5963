"""The predictor that needs no training: ridge regression."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.shape.predictor import StepPredictor, rms_norm


class RidgePredictor(StepPredictor):
    """Linear regression: no gradient, fitted in closed form by `monge.training.shape.calibrate`.

    Step n is M_n [h_t ; RMSNorm(e(x_{t+1})) ; 1]; a branched predictor adds the previous state
    and the branch's last token.
    """

    def __init__(self, hidden_size: int, num_steps: int, is_branched: bool) -> None:
        super().__init__(hidden_size, num_steps, is_branched)
        self.weight = nn.ParameterList(
            nn.Parameter(torch.zeros(hidden_size, self.num_inputs(number)), requires_grad=False)
            for number in range(1, num_steps + 1)
        )

    def num_inputs(self, number: int) -> int:
        """Columns of a step's matrix."""
        return (4 if self.is_branched and number > 1 else 2) * self.hidden_size + 1

    def start(
        self, states: Float[Tensor, "nodes hidden"], known: Float[Tensor, "nodes hidden"]
    ) -> Float[Tensor, "nodes start"]:
        return torch.cat([states, rms_norm(known), torch.ones_like(states[:, :1])], dim=-1)

    def inputs(
        self,
        number: int,
        start: Float[Tensor, "nodes start"],
        previous: Float[Tensor, "nodes hidden"],
        last: Float[Tensor, "nodes hidden"],
    ) -> Float[Tensor, "nodes inputs"]:
        """The regressors of a step."""
        return (
            torch.cat([start, previous, rms_norm(last)], dim=-1)
            if self.is_branched and number > 1
            else start
        )

    def step(
        self,
        number: int,
        start: Float[Tensor, "nodes start"],
        previous: Float[Tensor, "nodes hidden"],
        last: Float[Tensor, "nodes hidden"],
    ) -> Float[Tensor, "nodes hidden"]:
        return functional.linear(
            self.inputs(number, start, previous, last), self.weight[number - 1]
        )
