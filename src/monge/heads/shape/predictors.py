"""Predictors of future hidden states: a learned predictor, and linear regression.

At position t, the inputs are the hidden state h_t and the token x_{t+1} that was drawn from it. Step
n predicts h_{t+n}, which the target's output layer maps to the law of x_{t+1+n}.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from monge.core.errors import OptionError

States = Float[Tensor, "nodes hidden"]
Start = Float[Tensor, "nodes start"]


class StepPredictor(nn.Module, ABC):
    """Predicts step by step, each step from the previous step.

    Args:
        hidden_size: Width of the target's hidden states.
        num_steps: Number of steps.
        is_branched: Whether a step also reads the last drafted token of its branch. Otherwise all
            nodes of a depth share a law.
    """

    def __init__(self, hidden_size: int, num_steps: int, is_branched: bool) -> None:
        super().__init__()
        if num_steps < 1:
            raise OptionError(f"shape: num_steps must be at least 1; got {num_steps}")
        self.hidden_size, self.num_steps, self.is_branched = hidden_size, num_steps, is_branched
        self.settings = {"kind": "ridge", "num_steps": num_steps, "is_branched": is_branched}

    @abstractmethod
    def start(self, states: States, known: States) -> Start:
        """Computation shared by all steps of a text, from h_t and the embedding of x_{t+1}."""

    @abstractmethod
    def step(self, number: int, start: Start, previous: States, last: States) -> States:
        """The state of step `number` (from 1), from the previous state and the embedding of the branch's last token."""


class GatedPredictor(StepPredictor):
    """A gated residual on the previous state; at initialisation every prediction equals h_t.

    With u = RMSNorm(h_t) and s = [u ; U RMSNorm(e(x_{t+1}))], step n is

        r_n = B_n SiLU(A_n s),  g_n = sigmoid(G2_n G1_n u + beta_n),  h_n = h_{n-1} + g_n * r_n

    where B_n starts at zero. A branched predictor adds C_n [RMSNorm(h_{n-1}) ; RMSNorm(e)] inside
    SiLU from the second step on, e being the embedding of the branch's last token.

    Args:
        width: Rank of the residual.
        gate_rank: Rank of the gate.
        generator: Source of the initial weights; `None` leaves zeros, for loading.

    Reference:
        SHAPE (OpenReview FEttCBv3Ny, ICLR 2026 submission 18703). Its text is not public: residual,
        gate and N = 3 steps are stated there, the formulas are reconstructed. The branch's token is
        the idea of Hydra (arXiv 2402.05109).
    """

    def __init__(
        self,
        hidden_size: int,
        num_steps: int,
        is_branched: bool,
        *,
        width: int,
        gate_rank: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(hidden_size, num_steps, is_branched)
        if width < 1 or gate_rank < 1:
            raise OptionError(
                f"shape: width and gate_rank must be at least 1; got {width} and {gate_rank}"
            )

        def matrices(
            count: int, rows: int, columns: int, *, is_zero: bool = False
        ) -> nn.ParameterList:
            source = None if is_zero else generator
            return nn.ParameterList(_matrix(rows, columns, source) for _ in range(count))

        self.settings |= {"kind": "gated", "width": width, "gate_rank": gate_rank}
        self.token = _matrix(hidden_size, hidden_size, generator)
        self.down = matrices(num_steps, width, 2 * hidden_size)
        self.up = matrices(num_steps, hidden_size, width, is_zero=True)
        self.gate_down = matrices(num_steps, gate_rank, hidden_size)
        self.gate_up = matrices(num_steps, hidden_size, gate_rank, is_zero=True)
        self.gate_bias = nn.ParameterList(
            nn.Parameter(torch.full((hidden_size,), 2.0)) for _ in range(num_steps)
        )
        self.branch = matrices(num_steps - 1 if is_branched else 0, width, 2 * hidden_size)

    def start(self, states: States, known: States) -> Start:
        return torch.cat([rms_norm(states), functional.linear(rms_norm(known), self.token)], dim=-1)

    def step(self, number: int, start: Start, previous: States, last: States) -> States:
        index = number - 1
        inner = functional.linear(start, self.down[index])
        # Before the first step the branch is x_{t+1}, which is in `start`.
        if self.is_branched and index > 0:
            seen = torch.cat([rms_norm(previous), rms_norm(last)], dim=-1)
            inner = inner + functional.linear(seen, self.branch[index - 1])
        residual = functional.linear(functional.silu(inner), self.up[index])
        return previous + self.gate(number, start) * residual

    def gate(self, number: int, start: Start) -> States:
        """The gate g_n of a step, per coordinate; a function of h_t."""
        index = number - 1
        low = functional.linear(start[:, : self.hidden_size], self.gate_down[index])
        return torch.sigmoid(functional.linear(low, self.gate_up[index], self.gate_bias[index]))


class RidgePredictor(StepPredictor):
    """Linear regression: no gradient, fitted in closed form by `monge.training.calibrate`.

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

    def start(self, states: States, known: States) -> Start:
        return torch.cat([states, rms_norm(known), torch.ones_like(states[:, :1])], dim=-1)

    def inputs(
        self, number: int, start: Start, previous: States, last: States
    ) -> Float[Tensor, "nodes inputs"]:
        """The regressors of a step."""
        if not self.is_branched or number == 1:
            return start
        return torch.cat([start, previous, rms_norm(last)], dim=-1)

    def step(self, number: int, start: Start, previous: States, last: States) -> States:
        regressors = self.inputs(number, start, previous, last)
        return functional.linear(regressors, self.weight[number - 1])


def rms_norm(states: States) -> States:
    """Every row divided by its root mean square, in float32 or better; a row of zeros stays zero."""
    wide = states if states.dtype == torch.float64 else states.float()
    scale = wide.square().mean(dim=-1, keepdim=True).sqrt()
    return torch.where(scale > 0, wide / scale, 0.0).to(states.dtype)


def _matrix(rows: int, columns: int, generator: torch.Generator | None) -> nn.Parameter:
    if generator is None:
        return nn.Parameter(torch.zeros(rows, columns))
    return nn.Parameter(torch.randn(rows, columns, generator=generator) / columns**0.5)
