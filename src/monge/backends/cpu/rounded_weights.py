"""Networks whose linear layers store rounded weights.

A forward of a few tokens takes as long as reading its weights, so fewer bytes are faster. The
rounded network is another network: what is decoded keeps exactly *its* distribution.
"""

import copy
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.backends.cpu.native_library import why_no_compiler
from monge.backends.cpu.packed_linear import PackedLinear, load_packed_linear, pack_linears
from monge.core.errors import BackendError, unknown_name
from monge.networks.adapters import merge_adapters
from monge.networks.network_facts import WEIGHTS, why_no_copy
from monge.runtime.notices import notify

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def check_weights(weights: str) -> None:
    """Raise `OptionError` for a kind of weights that is none of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise unknown_name("kind of weights", weights, WEIGHTS)


def round_weights(network: PreTrainedModel, weights: str) -> PreTrainedModel:
    """Return a network with rounded weights in its linear layers; it computes in float32.

    Embeddings, norms and biases keep their values.

    Args:
        network: The network on the CPU; it is left as it is, and shares the tensors that stay.
        weights: `bfloat16`; or `int8` or `int4`, integers with a scale for every 64 or 32 of a row. With
            integers the inputs of a layer are rounded to 8 bits as well. With `int4` the output layer
            has 8 bits, and so has every layer that would lose too much; a message lists these.

    Raises:
        BackendError: If the network is not on the CPU, has weights of another type or adapters
            that cannot be merged, or there is no C++ compiler.
    """
    name = type(network).__name__
    if network.device.type != "cpu":
        raise BackendError(
            f"weights={weights!r} is for networks on the CPU; {name} is on {network.device}"
        )
    if network.dtype not in _FLOATS:
        raise BackendError(
            f"weights={weights!r} rounds networks of float32, bfloat16 or float16; {name} has "
            f"{network.dtype}"
        )
    if (reason := why_no_copy(network, merges=True)) is not None:
        raise BackendError(f"weights={weights!r}: {reason}")
    if (reason := why_no_compiler()) is not None:
        raise BackendError(f"weights={weights!r} needs a C++ compiler: {reason}")
    for tensor_name, weight in network.named_parameters():
        if not weight.isfinite().all():
            raise BackendError(
                f"weights={weights!r} needs finite weights; {tensor_name} of {name} holds infinity "
                "or NaN; mend the checkpoint, or use weights='exact'"
            )
    load_packed_linear()
    tensors: dict[int, Tensor] = {id(buffer): buffer for buffer in network.buffers()}
    # A layer that shares its matrix with the embeddings, as output layers do, gets tiles of its own.
    tensors |= {
        id(parameter): torch.nn.Parameter(parameter.detach().float(), requires_grad=False)
        for parameter in network.parameters()
    }
    with torch.inference_mode(mode=False), torch.no_grad():
        twin: PreTrainedModel = copy.deepcopy(network, dict(tensors))
        merge_adapters(twin)
        output = twin.get_output_embeddings()
        pack_linears(twin, weights, output)
        output = twin.get_output_embeddings()
    finer = [
        name
        for name, child in twin.named_modules()
        if weights == "int4"
        and isinstance(child, PackedLinear)
        and child.weights != weights
        and child is not output
    ]
    if finer:
        notify(f"{name} loses too much in 4 bits, these maps have 8: {', '.join(finer)}")
    twin.config.dtype = torch.float32
    return twin.eval()
