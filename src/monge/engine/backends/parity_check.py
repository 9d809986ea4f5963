"""A step beside the network that it replaces."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.core.model import Forward, NodeBlock
from monge.engine.backends.base import NodeStep, StepSpec
from monge.engine.models.hf_tree import HfTreeModel
from monge.engine.models.network_facts import tree_obstacle

AGREEMENT: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference to the network's own logits, as a share of the largest logit. Rounding stays well below; a lost mask or a
wrong position does not."""
_CHECKED_ROWS: Final = (1, 3, 2, 1)
_FAILURES: Final = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError),  # code that cannot be traced
    *(OSError, ImportError),  # no compiler, no room
)


def step_spec(network: PreTrainedModel, layers: tuple[int, ...] = ()) -> StepSpec:
    """What the inputs of a network's step look like, and which hidden states it gives."""
    model = HfTreeModel(network)
    model.open({0: (0, 0)})
    return replace(model.step_spec(), layers=layers)


def step_obstacle(network: PreTrainedModel, done: str) -> str | None:
    """Why a network can have no step in its place, where that is known before trying.

    Args:
        network: The network.
        done: What is done to networks to get one, for messages.
    """
    if (reason := tree_obstacle(network)) is not None:
        return f"{reason}; only networks that read trees are {done}"
    name, attention = type(network).__name__, str(network.config.get_text_config()._attn_implementation)
    if network.dtype not in AGREEMENT:
        return f"{name} has weights of type {network.dtype}; known are {', '.join(map(str, AGREEMENT))}"
    if attention not in {"eager", "sdpa"}:
        return f"{name} runs attention {attention!r}; eager and sdpa are {done}"
    return None


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """Make errors of a tracer, a compiler or a recorder into one of the backend, which begins with what cannot be done."""
    try:
        yield
    except _FAILURES as error:
        text = str(error).strip().splitlines() or [""]
        raise BackendError(f"{what}: {type(error).__name__}: {text[0][:300]}") from error


def require_agreement(network: PreTrainedModel, step: NodeStep, how: str, difference: float) -> None:
    """Refuse a step that differs from its network by more than rounding.

    Args:
        network: The network.
        step: The step.
        how: What was done to the network.
        difference: See `largest_difference`.

    Raises:
        BackendError: If it does.
    """
    bound = AGREEMENT[network.dtype]
    if not difference <= bound:  # written so that NaN fails
        name, what = type(network).__name__, "logits or hidden states" if step.layers else "logits"
        raise BackendError(
            f"{name}, {how}, has other {what} than the network: {difference:.2g} of the largest, not {bound:.2g}"
        )


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


def module_difference(module: torch.nn.Module, program: Forward, like: Sequence[Tensor]) -> float:
    """Largest difference of any number between a program and its module, as a share of that output's largest number.

    Both read the same made-up inputs, of several numbers of rows; that of the first comes again at the end.
    """
    differences: list[Tensor] = []
    with torch.inference_mode():
        for rows in _CHECKED_ROWS:
            inputs = [_wave(rows, index, tensor) for index, tensor in enumerate(like)]
            for ours, theirs in zip(program(*inputs), module(*inputs), strict=True):
                scale = theirs.abs().max().clamp(min=torch.finfo(theirs.dtype).tiny)
                differences.append(((ours - theirs).abs().max() / scale).double())
    return float(torch.stack(differences).max())  # NaN if any is


def _wave(rows: int, index: int, like: Tensor) -> Tensor:
    """Numbers between -2 and 2, no two rows alike."""
    places = torch.arange(rows * like.shape[1], dtype=torch.float64).reshape(rows, -1)
    return (2 * torch.sin((1.3 + index) * places + index)).to(like.dtype)
