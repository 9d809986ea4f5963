"""A step beside the network in whose place it runs."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.model import NodeBlock
from monge.engine.hf import HfTreeModel
from monge.engine.step import NodeStep, StepSpec


def step_spec(network: PreTrainedModel, layers: tuple[int, ...] = ()) -> StepSpec:
    """What the inputs of a network's step look like, and which hidden states it gives."""
    model = HfTreeModel(network)
    model.open({0: (0, 0)})
    return replace(model.step_spec(), layers=layers)


def largest_difference(network: PreTrainedModel, step: NodeStep) -> float:
    """Largest difference of any logit between a step and the network, as a share of the largest logit; or of a hidden state.

    Small trees and chains are read, for several rows and for one, and what follows a text that was read without logits.
    """
    first = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))
    rounds = (
        {0: first, 1: NodeBlock((9, 4), (-1, -1))},
        {1: NodeBlock((3,), (1,))},
        {2: NodeBlock.chain((5, 6, 7))},
    )
    read_on = {0: NodeBlock((3, 4), (-1, -1)), 1: NodeBlock.chain((9,))}
    worst = 0.0
    models = HfTreeModel(network), HfTreeModel(network, step)
    for model in models:
        if step.layers:
            model.watch(step.layers)
        model.open({0: (1, 2, 3), 1: (4, 3, 2, 1, 0, 5, 6, 7), 2: (8, 9)})
    for blocks in rounds:
        worst = max(worst, _of_logits(models, blocks))
    for model in models:
        model.commit({0: (0, 2), 1: (1, 2), 2: (0, 1, 2)})
        model.append({0: (2, 7, 5), 1: (1,)})
    worst = max(worst, _of_logits(models, read_on))
    for sequence in (0, 1, 2):
        ours, theirs = (model.features(sequence) for model in reversed(models))
        if ours is not None and theirs is not None:
            parts = (states.split(models[0].hidden_size, dim=-1) for states in (ours, theirs))
            worst = max(worst, *(_difference(*pair) for pair in zip(*parts, strict=True)))
    return worst


def _of_logits(models: tuple[HfTreeModel, HfTreeModel], blocks: Mapping[int, NodeBlock]) -> float:
    theirs, ours = (model.extend(blocks) for model in models)
    return max(_difference(ours[sequence], expected) for sequence, expected in theirs.items())


def _difference(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.abs().max().clamp(min=torch.finfo(theirs.dtype).tiny)
    return float((ours - theirs).abs().max() / scale)
