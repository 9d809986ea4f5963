"""Parity check: the forward of a backend must be about as accurate as the eager network that it replaces.

Rounding errors grow with depth and shrink with precision, so no constant separates them from
mistakes. The check measures them instead: it runs a float64 copy of the network, and allows a
backend a few times the error of the eager network.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.networks.base import CachedStep, ModuleForward, NodeBlock
from monge.networks.forward import FastForward, Forward, ForwardMaker, ForwardSpec
from monge.networks.head_model import step_inputs
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import packed_layers, why_no_copy, why_no_tree

_CLOSE: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 0.004,
    torch.bfloat16: 0.03,
}
"""Differences to the eager outputs, as a share of the largest output, that need no float64 copy to be called rounding."""
_TOLERANCE: Final = 4.0
"""Largest error of a backend, in units of the eager network's error."""
# Of a float64 copy; larger networks are compared with the eager network only. Networks of files are
# loaded where memory is short, and a copy takes up to 16 times theirs.
_MAX_BYTES: Final = 2 << 30
_MAX_FILE_BYTES: Final = 1 << 28
_LARGE_NETWORK: Final = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
"""Root mean square of the difference to the eager outputs, as a share of that of the outputs, for large networks.
It hardly depends on the depth of a network; a lost mask or a wrong position exceeds it."""
_LARGE_ROUNDED_NETWORK: Final = 0.1
"""The same if layers round their inputs to 8 bits: the last digit of a sum may decide between two integers."""
_CHECKED_ROWS: Final = (1, 3, 2, 1)  # batch sizes at which a module is checked
_FAILURES: Final = (
    # Code that cannot be traced.
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError),
    *(OSError, ImportError),  # no compiler, no disk space
)
AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


def forward_spec(network: PreTrainedModel) -> ForwardSpec:
    """Return the shapes of a network's forward."""
    model = HfTreeModel(network)
    model.open({0: (0, 0)})
    return model.forward_spec()


def why_no_fast_forward(network: PreTrainedModel, done: str, *, merges: bool = False) -> str | None:
    """Return the reason why a network's forward cannot be replaced, if that is known before trying.

    Args:
        network: The network.
        done: Participle for messages: "compiled".
        merges: Whether adapters are merged in the copy that is replaced.
    """
    if (reason := why_no_tree(network)) is not None:
        return f"{reason}; only networks that read trees are {done}"
    # Merged in half precision, an adapter would be rounded to a part of its own digits.
    merges = merges and network.dtype in {torch.float32, torch.float64}
    if (reason := why_no_copy(network, merges=merges)) is not None:
        return reason
    name = type(network).__name__
    attention = str(network.config.get_text_config()._attn_implementation)
    if network.dtype not in _CLOSE:
        return (
            f"{name} has weights of type {network.dtype}; known are {', '.join(map(str, _CLOSE))}"
        )
    if attention not in {"eager", "sdpa"}:
        return f"{name} runs attention {attention!r}; eager and sdpa are {done}"
    return None


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """Turn errors of a tracer, a compiler or a graph capture into a `BackendError` that begins with `what`."""
    try:
        yield
    except BackendError:
        raise
    except _FAILURES as error:
        text = str(error).strip().splitlines() or [""]
        raise BackendError(f"{what}: {type(error).__name__}: {text[0][:300]}") from error


def check_forward(network: PreTrainedModel, step: FastForward, how: str) -> None:
    """Compare a step with its network on small trees, chains and prompts.

    Raises:
        BackendError: If logits or hidden states differ by more than rounding.
    """

    def read(of: PreTrainedModel, step_of: ForwardMaker | None = None) -> list[Tensor]:
        return _test_outputs(HfTreeModel(of, step_of), step.layers)

    reason = difference(
        read(network, lambda _: Forward(step)),
        read(network),
        lambda: read(_in_float64(network)) if _is_small(network) else None,
        network.dtype,
        _most_of_large(network, network.dtype),
    )
    if reason is not None:
        what = "logits or hidden states" if step.layers else "logits"
        raise BackendError(
            f"{type(network).__name__}, {how}, has other {what} than the network: {reason}"
        )


def check_module(
    module: torch.nn.Module, compiled: ModuleForward, like: Sequence[Tensor], how: str
) -> None:
    """Compare a compiled module with the module on artificial inputs of several batch sizes.

    Args:
        module: The module.
        compiled: The compiled module.
        like: See `example_inputs`.
        how: Participle for messages: "compiled".

    Raises:
        BackendError: If outputs differ by more than rounding.
    """

    def outputs(run: ModuleForward, dtype: torch.dtype | None = None) -> list[Tensor]:
        tensors: list[Tensor] = []

        def used(tensor: Tensor) -> Tensor:
            is_number = tensor.is_floating_point()  # a clone, since steps write into their caches
            return tensor.to(dtype if dtype and is_number else tensor.dtype, copy=True)

        with torch.inference_mode():
            for example in example_inputs(module, like):
                tensors += [output.clone() for output in run(*tree_map(used, example))]
        return tensors

    reason = difference(
        outputs(compiled),
        outputs(module),
        lambda: outputs(_in_float64(module), torch.float64) if _is_small(module) else None,
        like[0].dtype,
        _most_of_large(module, like[0].dtype),
    )
    if reason is not None:
        raise BackendError(f"{type(module).__name__}, {how}, gives other numbers: {reason}")


def example_inputs(module: torch.nn.Module, like: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return artificial inputs of several batch sizes.

    Args:
        module: A `CachedStep`, or a module of matrices with a row for each node.
        like: Tensors with the widths and types of its inputs; for a step, a tensor of its type.
    """
    if isinstance(module, CachedStep):
        sizes = ((2, 3, 5), (1, 1, 1), (3, 1, 3), (1, 4, 4))
        return [step_inputs(module, like[0], *size) for size in sizes]
    return [
        tuple(_wave(rows, index, tensor) for index, tensor in enumerate(like))
        for rows in _CHECKED_ROWS
    ]


def difference(
    ours: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Callable[[], Sequence[Tensor] | None],
    dtype: torch.dtype,
    most_of_large: float,
) -> str | None:
    """Return the difference of outputs to those of the eager network, if it is more than rounding.

    Args:
        ours: Outputs of the backend, `[rows, width]` each.
        eager: Outputs of the eager network.
        exact: Computes the outputs of its float64 copy, if needed; `None` for a large network.
        dtype: Type in which backend and eager network compute.
        most_of_large: Largest root mean square of the difference, as a share of that of the outputs,
            that is rounding if there is no float64 copy.
    """
    # Comparisons are written so that NaN fails.
    if all(
        float((candidate - host).abs().max())
        <= _CLOSE[dtype] * float(host.abs().max().clamp(min=torch.finfo(host.dtype).tiny))
        for candidate, host in zip(ours, eager, strict=True)
    ):
        return None
    reference = None if dtype == torch.float64 else exact()
    if reference is None:
        wide = torch.promote_types(dtype, torch.float32)
        shares = [
            _rms(candidate.to(wide) - host.to(wide)) / _rms(host)
            for candidate, host in zip(ours, eager, strict=True)
        ]
        if all(share <= most_of_large for share in shares):
            return None
        return f"by {max(shares):.2g} of the network's (root mean square), at most {most_of_large:.2g} is rounding"
    for candidate, host, true in zip(ours, eager, reference, strict=True):
        error, rounding = (
            float((output.double() - true).abs().max()) for output in (candidate, host)
        )
        if not error <= _TOLERANCE * rounding:
            return f"{error:.2g} from a float64 run, where the network is {rounding:.2g} from it"
        top = true.topk(2, dim=-1)
        is_clear = top.values[..., 0] - top.values[..., 1] > _TOLERANCE * rounding
        if bool((is_clear & (candidate.argmax(dim=-1) != top.indices[..., 0])).any()):
            return "the largest is another one, although it is larger than the next by more than rounding"
    return None


def _test_outputs(model: HfTreeModel, layers: tuple[int, ...]) -> list[Tensor]:
    """Return logits of all nodes, then hidden states of committed tokens layer by layer.

    The nodes are those of small trees and chains, for several rows and for a single row, and after
    a text that was read without logits.
    """

    def tokens(*numbers: int) -> tuple[int, ...]:
        # Spread over the vocabulary: the first tokens are often special, and texts of them
        # ill-conditioned.
        return tuple((1000 + 3371 * number) % model.vocab_size for number in numbers)

    first = NodeBlock(tokens(5, 6, 7, 8), (-1, 0, 0, 1))
    rounds = (
        {0: first, 1: NodeBlock(tokens(9, 4), (-1, -1))},
        {1: NodeBlock(tokens(3), (1,))},
        {2: NodeBlock.chain(tokens(5, 6, 7))},
    )
    read_on = {0: NodeBlock(tokens(3, 4), (-1, -1)), 1: NodeBlock.chain(tokens(9))}
    watched = model.watch(layers) if layers else None
    model.open({0: tokens(1, 2, 3), 1: tokens(4, 3, 2, 1, 0, 5, 6, 7), 2: tokens(8, 9)})
    logits = [rows for blocks in rounds for rows in _extend(model, blocks)]
    model.commit({0: (0, 2), 1: (1, 2), 2: (0, 1, 2)})
    model.append({0: tokens(2, 7, 5), 1: tokens(1)})
    logits += _extend(model, read_on)
    if watched is None:
        return [torch.cat(logits)]
    states = [state for sequence in (0, 1, 2) if (state := watched.take(sequence)) is not None]
    return [torch.cat(logits), *torch.cat(states).split(model.hidden_size, dim=-1)]


def _extend(model: HfTreeModel, blocks: Mapping[int, NodeBlock]) -> list[Tensor]:
    logits = model.extend(blocks)
    return [logits[sequence].clone() for sequence in blocks]


def _in_float64(module: AnyModule) -> AnyModule:
    """A float64 copy, made without a copy in the module's own type."""
    with torch.inference_mode(mode=False):
        twins: dict[int, Tensor] = {
            id(weight): torch.nn.Parameter(weight.detach().double(), requires_grad=False)
            for weight in module.parameters()
        }
        packed = packed_layers(module)
        known = {id(layer.panels) for layer in packed}
        twins |= {
            id(buffer): buffer.double()
            for buffer in module.buffers()
            if buffer.is_floating_point() and id(buffer) not in known
        }
        plain = {id(layer): layer.unpacked(torch.float64) for layer in packed}
        return copy.deepcopy(module, {**twins, **plain})


def _most_of_large(module: torch.nn.Module, dtype: torch.dtype) -> float:
    rounds_inputs = any(layer.rounds_inputs for layer in packed_layers(module))
    return _LARGE_ROUNDED_NETWORK if rounds_inputs else _LARGE_NETWORK[dtype]


def _is_small(module: torch.nn.Module) -> bool:
    count = sum(weight.numel() for weight in module.parameters())
    packed = packed_layers(module)
    count += sum(layer.width * layer.depth for layer in packed)
    is_of_file = any(layer.weights == "file" for layer in packed)
    return count * torch.float64.itemsize <= (_MAX_FILE_BYTES if is_of_file else _MAX_BYTES)


def _rms(tensor: Tensor) -> float:
    # Summed in float64 without a copy, which of a large vocabulary takes 100 MB.
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) / math.sqrt(tensor.numel())


def _wave(rows: int, index: int, like: Tensor) -> Tensor:
    """Numbers between -2 and 2, no two rows alike."""
    places = torch.arange(rows * like.shape[1], dtype=torch.float64).reshape(rows, -1)
    return (2 * torch.sin((1.3 + index) * places + index)).to(like)
