"""A step beside the network in whose place it runs."""

import torch
from transformers import PreTrainedModel

from monge.core.model import NodeBlock
from monge.engine.hf import HfTreeModel
from monge.engine.step import NodeStep, StepSpec


def step_spec(network: PreTrainedModel) -> StepSpec:
    """What the inputs of a network's step look like."""
    model = HfTreeModel(network)
    model.open({0: (0, 0)})
    return model.step_spec()


def largest_difference(network: PreTrainedModel, step: NodeStep) -> float:
    """Largest difference of any logit between a step and the network, as a share of the largest logit.

    Small trees and chains are read, for several rows and for one.
    """
    first = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))
    rounds = (
        {0: first, 1: NodeBlock((9, 4), (-1, -1))},
        {1: NodeBlock((3,), (1,))},
        {2: NodeBlock.chain((5, 6, 7))},
    )
    worst = 0.0
    models = HfTreeModel(network), HfTreeModel(network, step)
    for model in models:
        model.open({0: (1, 2, 3), 1: (4, 3, 2, 1, 0, 5, 6, 7), 2: (8, 9)})
    for blocks in rounds:
        ours, theirs = (model.extend(blocks) for model in reversed(models))
        for sequence, expected in theirs.items():
            scale = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
            worst = max(worst, float((ours[sequence] - expected).abs().max() / scale))
    return worst
