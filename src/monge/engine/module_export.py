"""A small module as one graph of tensors, and a program of it beside the module itself."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental import _config

from monge.core.model import Forward

_CHECKED_ROWS: Final = (1, 3, 2, 1)
_tracing: Any = _config  # its `patch` is installed at run time, out of sight of type checkers


def export_module(module: torch.nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...]) -> ExportedProgram:
    """Trace a module.

    Args:
        module: The module.
        inputs: Its inputs.
        shapes: Which of their sizes vary.
    """
    # Size-oblivious: otherwise a size of one would be a program of its own.
    with torch.no_grad(), _tracing.patch(backed_size_oblivious=True):
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


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
