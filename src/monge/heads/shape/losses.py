"""What a head is trained on, step by step.

In the maths p = target, q = draft. A drafted token is accepted with probability sum_v min(p_v, q_v) = 1 - TV(p, q).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from monge.core.errors import OptionError
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.measure import predictions
from monge.heads.shape.sinkhorn import sinkhorn_divergence
from monge.heads.shape.texts import Ends, Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the parts of the loss.

        sum_n decay^(n-1) [ KL(p || q_n) + tv TV(p, q_n) + cosine (1 - cos(h'_n, h_n)) + sinkhorn S(h'_n, h_n) ]

    Args:
        tv: Of the rejection probability.
        cosine: Of the angle between predicted and true state.
        sinkhorn: Of the debiased Sinkhorn divergence between the two clouds of a batch, in a subspace. The pairs are known, so
            it regularises the law of the predictions and never replaces the other parts.
        decay: Of a step against the one before.

    Raises:
        OptionError: If a weight is negative.
    """

    tv: float = 0.5
    cosine: float = 0.1
    sinkhorn: float = 0.05
    decay: float = 0.8

    def __post_init__(self) -> None:
        if min(self.tv, self.cosine, self.sinkhorn, self.decay) < 0:
            raise OptionError(f"shape training: weights must be at least 0; got {self}")


def head_loss(
    head: ShapeHead, windows: Windows, ends: Ends, weights: Weights, subspace: Float[Tensor, "size hidden"]
) -> Float[Tensor, ""]:
    """Mean loss of a batch of windows.

    Args:
        head: The head.
        windows: Teacher-forced text of the target.
        ends: The target's ends; `unembed` must let gradients through.
        weights: Of the parts.
        subspace: Directions in which the clouds are compared.
    """
    parts: list[Tensor] = []
    for index, state in enumerate(predictions(head, windows)):
        true = windows.true[:, index]
        with torch.no_grad():
            target = ends.unembed(true).float()
        logits = head.cooled(index + 1, ends.unembed(state)).float()
        kl, tv = law_losses(target, logits)
        loss = kl + weights.tv * tv
        if weights.cosine > 0:
            loss = loss + weights.cosine * (1.0 - functional.cosine_similarity(state.float(), true.float(), dim=1)).mean()
        if weights.sinkhorn > 0:
            clouds = (state.float() @ subspace.T, true.float() @ subspace.T)
            loss = loss + weights.sinkhorn * sinkhorn_divergence(*clouds)
        parts.append(weights.decay**index * loss)
    return torch.stack(parts).sum()


def law_losses(
    target: Float[Tensor, "nodes vocab"], logits: Float[Tensor, "nodes vocab"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean KL(p || q) and TV(p, q) of the laws of two rows of logits."""
    log_p, log_q = target.log_softmax(dim=1), logits.log_softmax(dim=1)
    p = log_p.exp()
    # A token without mass is minus infinity in the logarithm and counts nothing.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)
    tv = 1.0 - torch.minimum(p, log_q.exp()).sum(dim=1)
    return kl.mean(), tv.mean()
