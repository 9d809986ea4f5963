"""Control arm of the alignments: mean and variance of every coordinate, no correlations."""

import torch
from jaxtyping import Float
from torch import Tensor

from monge.heads.shape.alignment import Alignment
from monge.heads.shape.head import ShapeHead, StepAlignment, TargetSizes
from monge.heads.shape.predictors import RidgePredictor, StepPredictor
from monge.training.calibrate import calibrate_alignments, calibrate_ridge, calibrate_temperatures
from monge.training.texts import Ends, Texts


class DiagonalMap(Alignment):
    """The Gaussian map under independent coordinates: shift and scale.

    A coordinate with constant predictions keeps its scale.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("shift", torch.zeros(size))

    def fit(
        self, predicted: Float[Tensor, "nodes size"], true: Float[Tensor, "nodes size"]
    ) -> None:
        from_, to = predicted.double(), true.double()
        spread = from_.std(dim=0, correction=0)
        scale = torch.where(spread > 0, to.std(dim=0, correction=0) / spread, 1.0)
        self.scale.copy_(scale)
        self.shift.copy_(to.mean(dim=0) - scale * from_.mean(dim=0))

    def map(self, states: Float[Tensor, "nodes size"]) -> Float[Tensor, "nodes size"]:
        return states * self.scale + self.shift


def head_with(arm: str, predictor: StepPredictor, sizes: TargetSizes) -> ShapeHead:
    """Return a head with the alignments of an arm: a name of `ALIGNMENTS`, `temperature` or `diagonal`."""
    if arm != "diagonal":
        return ShapeHead(predictor, sizes, "none" if arm == "temperature" else arm)
    head = ShapeHead(predictor, sizes, "gaussian")
    for step in head.alignments:
        assert isinstance(step, StepAlignment)
        step.alignment = DiagonalMap(step.alignment.size)
    return head


def fit(head: ShapeHead, arm: str, fitted: Texts, chosen: Texts, ends: Ends) -> None:
    """Fit a head of an arm; a trained predictor stays, and one of ridge regression is fitted too."""
    if isinstance(head.predictor, RidgePredictor):
        calibrate_ridge(head, fitted, chosen, ends)
    else:
        calibrate_alignments(head, fitted, chosen, ends)
    if arm == "temperature":
        calibrate_temperatures(head, chosen, ends)
