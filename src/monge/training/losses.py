"""Training losses: distances of a draft law from the target law.

In the maths p = target, q = draft. A drafted token is accepted with probability sum_v min(p_v, q_v)
= 1 - TV(p, q).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the loss terms.

        sum_n decay^(n-1) [ KL(p || q_n) + tv TV(p, q_n) + cosine (1 - cos(h'_n, h_n)) + sinkhorn
        S(h'_n, h_n) ]

    Args:
        tv: Weight of the rejection probability.
        cosine: Weight of the angle between predicted and true state.
        sinkhorn: Weight of the debiased Sinkhorn divergence between the two clouds of a batch, in a
            subspace. It regularises the law of the predictions.
        decay: Weight of a step relative to the previous one.

    Raises:
        OptionError: If a weight is negative.
    """

    tv: float = 0.5
    cosine: float = 0.1
    sinkhorn: float = 0.05
    decay: float = 0.8

    def __post_init__(self) -> None:
        if min(self.tv, self.cosine, self.sinkhorn, self.decay) < 0:
            raise OptionError(f"head training: weights must be at least 0; got {self}")


def law_losses(
    target: Float[Tensor, "nodes vocab"], logits: Float[Tensor, "nodes vocab"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean KL(p || q) and TV(p, q) of two batches of logits."""
    log_p, log_q = target.log_softmax(dim=1), logits.log_softmax(dim=1)
    p = log_p.exp()
    # A token without mass is minus infinity in the logarithm and counts nothing.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)
    tv = 1.0 - torch.minimum(p, log_q.exp()).sum(dim=1)
    return kl.mean(), tv.mean()
