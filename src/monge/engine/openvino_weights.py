"""Weights of a graph, as they are or with fewer bits: always those of a network that `transformers` runs too."""

import copy
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError

WEIGHTS: Final = ("same", "bf16", "int8")
"""How weights of linear maps are held: as the network has them; rounded to bfloat16; as 8-bit integers with one scale a row."""
_INT8: Final = 127


def with_weights(network: PreTrainedModel, weights: str) -> PreTrainedModel:
    """The network whose linear maps have weights of fewer bits: what a graph with such weights computes, to rounding.

    It shares all other tensors with the network, which is left as it is.

    Args:
        network: The network.
        weights: One of `WEIGHTS`.

    Raises:
        BackendError: If most of the network's weights are no matrices of linear maps.
    """
    if weights == "same":
        return network
    linear = linear_weights(network)
    covered, total = (sum(tensor.numel() for tensor in tensors) for tensors in (linear.values(), network.parameters()))
    if 2 * covered < total:
        raise BackendError(
            f"{type(network).__name__} holds {covered / total:.0%} of its parameters in linear maps, the only ones that have "
            f"weights={weights!r}; use weights='same'"
        )
    rounded = {key: torch.nn.Parameter(_rounded(tensor, weights), requires_grad=False) for key, tensor in linear.items()}
    kept = {id(tensor): rounded.get(id(tensor), tensor) for tensor in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(network, dict(kept))


def linear_weights(network: PreTrainedModel) -> dict[int, Tensor]:
    """Weights of linear maps by identity, tied ones once."""
    maps = (module for module in network.modules() if isinstance(module, torch.nn.Linear))
    return {id(module.weight): module.weight.detach() for module in maps}


def constant(tensor: Tensor, weights: str, *, is_copied: bool = False) -> Any:
    """A node of an OpenVINO graph with these values.

    Args:
        tensor: Values that weights of this kind can hold.
        weights: One of `WEIGHTS`. With `same`, a matrix whose numbers all have 16 bits is held in 16 bits: a step of few nodes
            lasts as long as reading the weights does. Any other shares its memory.
        is_copied: Share none: a constant that shares memory does not keep it alive.
    """
    import openvino
    from openvino import opset13

    narrow = {"same": _exact_type(tensor), "bf16": torch.bfloat16}.get(weights)
    if narrow is not None:
        kind = openvino.Type.bf16 if narrow == torch.bfloat16 else openvino.Type.f16
        bits = openvino.Tensor(tensor.to(narrow).view(torch.int16).numpy(), list(tensor.shape), kind)
        widened = opset13.convert(opset13.constant(bits, shared_memory=False), openvino.Type.f32)
        widened.get_rt_info()["decompression_0"] = ""  # unmarked, the runtime would widen the matrix once and for all
        return widened
    if weights == "same":
        return opset13.constant(tensor.numpy(), shared_memory=tensor.is_contiguous() and not is_copied)
    scale = _scale(tensor)
    codes = opset13.constant((tensor / scale).round().to(torch.int8).numpy())
    return opset13.multiply(opset13.convert(codes, openvino.Type.f32), opset13.constant(scale.numpy()))


def _exact_type(tensor: Tensor) -> torch.dtype | None:
    """A type of 16 bits that holds every number of a matrix, as it does where a checkpoint of that type was loaded."""
    if tensor.ndim != 2 or tensor.dtype != torch.float32:
        return None
    return next((kind for kind in (torch.bfloat16, torch.float16) if torch.equal(tensor.to(kind).float(), tensor)), None)


def _rounded(tensor: Tensor, weights: str) -> Tensor:
    if weights == "bf16":
        return tensor.bfloat16().to(tensor.dtype)
    scale = _scale(tensor)
    return (tensor / scale).round() * scale


def _scale(tensor: Tensor) -> Tensor:
    largest = tensor.abs().amax(dim=1, keepdim=True)
    # A row of zeros is zero at any scale.
    return torch.where(largest > 0, largest / _INT8, 1.0)
