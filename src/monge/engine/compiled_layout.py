"""Weights in the order in which products of a few rows read them."""

import torch
from transformers.pytorch_utils import Conv1D

from monge.engine.few_rows import FewRows


def lay_out(module: torch.nn.Module) -> None:
    """Lay out anew the weights of linear maps inside a module, which is changed; the tensors that it had are not.

    Float32 maps become `FewRows`; weights of float64, and of maps that are more than a map, lie transposed. Half precision
    stays: torch has products of few rows for the usual order only, in the other they take ten times longer.

    Args:
        module: A module; itself no linear map.
    """
    made = dict[int, torch.nn.Module]()  # a map that is used in several places stays one
    for parent in tuple(module.modules()):
        for name, child in tuple(parent.named_children()):
            if id(child) not in made:
                made[id(child)] = _laid_out(child)
            if made[id(child)] is not child:
                parent.add_module(name, made[id(child)])


def _laid_out(child: torch.nn.Module) -> torch.nn.Module:
    if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
        return FewRows(child.weight, child.bias)
    if type(child) is Conv1D and child.weight.dtype == torch.float32:
        return FewRows(child.weight.t(), child.bias)
    if isinstance(child, torch.nn.Linear) and child.weight.dtype in {torch.float32, torch.float64}:
        child.weight = torch.nn.Parameter(child.weight.detach().t().contiguous().t(), requires_grad=False)
    return child
