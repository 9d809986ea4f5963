"""The learned predictor of SHAPE: low rank, residual, gated."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from monge.core.errors import OptionError
from monge.heads.shape.predictor import StepPredictor, rms_norm


class GatedPredictor(StepPredictor):
    """A gated residual on the previous state; at initialisation every prediction equals h_t.

    With u = RMSNorm(h_t) and s = [u ; U RMSNorm(e(x_{t+1}))], step n is

        r_n = B_n SiLU(A_n s),  g_n = sigmoid(G2_n G1_n u + beta_n),  h_n = h_{n-1} + g_n * r_n

    where B_n starts at zero. A branched predictor adds C_n [RMSNorm(h_{n-1}) ; RMSNorm(e)] inside
    SiLU from the second step on, e being the embedding of the branch's last token.

    Args:
        hidden_size: See `StepPredictor`.
        num_steps: See `StepPredictor`.
        is_branched: See `StepPredictor`.
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
        self.width, self.gate_rank = width, gate_rank
        self.token = _matrix(hidden_size, hidden_size, generator)
        steps = range(num_steps)
        self.down = nn.ParameterList(_matrix(width, 2 * hidden_size, generator) for _ in steps)
        self.up = nn.ParameterList(_matrix(hidden_size, width, None) for _ in steps)
        self.gate_down = nn.ParameterList(_matrix(gate_rank, hidden_size, generator) for _ in steps)
        self.gate_up = nn.ParameterList(_matrix(hidden_size, gate_rank, None) for _ in steps)
        self.gate_bias = nn.ParameterList(
            nn.Parameter(torch.full((hidden_size,), 2.0)) for _ in steps
        )
        self.branch = nn.ParameterList(
            _matrix(width, 2 * hidden_size, generator) for _ in (steps[1:] if is_branched else ())
        )

    def start(
        self, states: Float[Tensor, "nodes hidden"], known: Float[Tensor, "nodes hidden"]
    ) -> Float[Tensor, "nodes start"]:
        return torch.cat([rms_norm(states), functional.linear(rms_norm(known), self.token)], dim=-1)

    def step(
        self,
        number: int,
        start: Float[Tensor, "nodes start"],
        previous: Float[Tensor, "nodes hidden"],
        last: Float[Tensor, "nodes hidden"],
    ) -> Float[Tensor, "nodes hidden"]:
        index = number - 1
        inner = functional.linear(start, self.down[index])
        # Before the first step the branch is x_{t+1}, which is in `start`.
        if self.is_branched and index > 0:
            seen = torch.cat([rms_norm(previous), rms_norm(last)], dim=-1)
            inner = inner + functional.linear(seen, self.branch[index - 1])
        residual = functional.linear(functional.silu(inner), self.up[index])
        return previous + self.gate(number, start) * residual

    def gate(
        self, number: int, start: Float[Tensor, "nodes start"]
    ) -> Float[Tensor, "nodes hidden"]:
        """The gate g_n of a step, per coordinate; a function of h_t."""
        low = functional.linear(start[:, : self.hidden_size], self.gate_down[number - 1])
        return torch.sigmoid(
            functional.linear(low, self.gate_up[number - 1], self.gate_bias[number - 1])
        )


def _matrix(rows: int, columns: int, generator: torch.Generator | None) -> nn.Parameter:
    if generator is None:
        return nn.Parameter(torch.zeros(rows, columns))
    return nn.Parameter(torch.randn(rows, columns, generator=generator) / columns**0.5)
