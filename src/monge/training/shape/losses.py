"""The training loss of a head.

In the maths p = target, q = draft. A drafted token is accepted with probability sum_v min(p_v, q_v)
= 1 - TV(p, q).
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from monge.heads.shape.head import ShapeHead
from monge.heads.shape.sinkhorn import sinkhorn_divergence
from monge.training.losses import Weights, law_losses
from monge.training.shape.measure import predictions
from monge.training.texts import Ends, Windows


def head_loss(
    head: ShapeHead,
    windows: Windows,
    ends: Ends,
    weights: Weights,
    subspace: Float[Tensor, "size hidden"],
) -> Float[Tensor, ""]:
    """Mean loss of a batch of windows.

    Args:
        head: The head.
        windows: Teacher-forced text of the target.
        ends: The target's ends; `unembed` must let gradients through.
        weights: Weights of the loss terms.
        subspace: Directions in which the Sinkhorn term compares the clouds.
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
            loss = (
                loss
                + weights.cosine
                * (1.0 - functional.cosine_similarity(state.float(), true.float(), dim=1)).mean()
            )
        if weights.sinkhorn > 0:
            clouds = (state.float() @ subspace.T, true.float() @ subspace.T)
            loss = loss + weights.sinkhorn * sinkhorn_divergence(*clouds)
        parts.append(weights.decay**index * loss)
    return torch.stack(parts).sum()
