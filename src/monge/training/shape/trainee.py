"""Training of a SHAPE head by the loop that all heads share.

In the maths p = target, q = draft. A drafted token is accepted with probability sum_v min(p_v, q_v)
= 1 - TV(p, q).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from monge.heads.shape.head import ShapeHead
from monge.heads.shape.sinkhorn import sinkhorn_divergence
from monge.training.loop import Trainee
from monge.training.losses import Weights, law_losses
from monge.training.shape.calibrate import principal_directions
from monge.training.shape.measure import measure, predictions
from monge.training.texts import Ends, Texts, Windows, random_windows

_SUBSPACE: Final = 64
_SUBSPACE_STATES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTrainee(Trainee):
    """A SHAPE head whose predictor is trained in place.

    Args:
        head: The head.
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping.
        ends: The target's embedding and output layer.
        parts: Weights of the loss terms.
        mixed: Autocast type of the predictor; `None` disables autocast.
    """

    head: ShapeHead
    fitted: Texts
    held_out: Texts
    ends: Ends
    parts: Weights
    mixed: torch.dtype | None = None
    subspace: Float[Tensor, "size hidden"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        some = self.fitted.states.flatten(0, 1)[:_SUBSPACE_STATES]
        subspace = principal_directions(some.float(), min(_SUBSPACE, some.shape[1]))
        object.__setattr__(self, "subspace", subspace)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.head.predictor.named_parameters())

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        num_steps = self.head.predictor.num_steps
        windows = random_windows(self.fitted, batch_size, num_steps, self.ends, generator)
        with torch.autocast(
            self.subspace.device.type, dtype=self.mixed, enabled=self.mixed is not None
        ):
            return head_loss(self.head, windows, self.ends, self.parts, self.subspace)

    def look(self) -> float:
        return measure(self.head, self.held_out, self.ends).block_efficiency


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
