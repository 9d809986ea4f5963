"""What a network computes with at a time, so that nothing that it computed with something else is used later."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from monge.networks.adapters import switches_of

_HARMLESS_HOOKS: Final = ("make_inputs_require_grad", "output_capturing_hook")
"""Beginnings of the names of hooks that change no number.

Gradient checkpointing adds the first, and transformers the second once it returned hidden
states."""
_SAMPLES: Final = 4  # numbers of a tensor
_NUM_SHARED: Final = len(vars(torch.nn.Module()))
"""Attributes that all modules have; they come first."""


class NetworkState:
    """Layers, hooks, weights, buffers and numbers of a network, and how its adapters are switched.

    States are equal until something is replaced, added, removed, or written where torch counts it.
    Torch does not count numbers that are written through `.data`, or in inference mode. Of other
    attributes only whole numbers and floats are compared, and the settings in `config` are not.

    A state holds what it names, so that nothing else comes to lie in its place.

    Args:
        network: The network.
        counts_writes: Whether numbers that are written in place make another state.
    """

    def __init__(self, network: torch.nn.Module, *, counts_writes: bool = True) -> None:
        held, facts, self.tensors = list[object](), list[object](), list[Tensor]()
        for module in _modules(network):
            held.append(module)
            if module is None:
                continue
            facts += (type(module), switches_of(module), hooks_of(module), *module._modules)
            facts += _numbers_of(module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                held.append(tensor)
                facts.append(name)
                if tensor is not None:
                    self.tensors += _plain(tensor)
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        for tensor in self.tensors:
            is_counted = counts_writes and not tensor.is_inference()
            facts += (tensor.data_ptr(), tensor._version if is_counted else 0)
        self._held, self._facts = (held, storages), [*map(id, held), *facts]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NetworkState) and self._facts == other._facts

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class NetworkVersion:
    """Counts the changes of a network. It looks for changes only when `of` is called.

    Beside a `NetworkState` it compares a few numbers of each tensor. They show that a whole tensor
    was written through `.data`; such writes to a part of a tensor may not be seen.
    """

    def __init__(self) -> None:
        self._number, self._state = 0, None
        self._views, self._numbers = list[list[Tensor]](), list[bytes]()

    def of(self, network: torch.nn.Module) -> int:
        """Return the number of changes; takes about a millisecond for some hundred layers."""
        state = NetworkState(network)
        is_other = state != self._state
        if is_other:
            self._state, self._views = state, _sampled(state.tensors)
        numbers = [_bytes_of(views) for views in self._views]
        if is_other or numbers != self._numbers:
            self._number, self._numbers = self._number + 1, numbers
        return self._number


def _numbers_of(module: torch.nn.Module) -> list[object]:
    """Return what a module computes with beside its tensors, such as the scale of attention."""
    own = islice(vars(module).values(), _NUM_SHARED, None)
    return [value for value in own if type(value) is float or type(value) is int]


def hooks_of(module: torch.nn.Module) -> tuple[object, ...]:
    """Return what was put around or in place of a module's forward; numbers of hooks are never used again."""
    forward = vars(module).get("forward")
    if not (module._forward_hooks or module._forward_pre_hooks or forward):
        return ()
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    numbers = (number for number, hook in hooks if not is_harmless(hook))
    return *numbers, *([] if forward is None else [forward])


def is_harmless(hook: Any) -> bool:
    """Return whether a hook changes no number."""
    return getattr(hook, "__name__", "").startswith(_HARMLESS_HOOKS)


def _modules(network: torch.nn.Module) -> Iterator[torch.nn.Module | None]:
    """Yield modules as often as they are used: another use of a module is a change."""
    waiting: list[torch.nn.Module | None] = [network]
    known = set[int]()
    while waiting:
        module = waiting.pop()
        yield module
        if module is not None and id(module) not in known:
            known.add(id(module))
            waiting += module._modules.values()


def _plain(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory of a tensor, which may be a wrapper, as those of shards are."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _sampled(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return views of a few numbers of each tensor, by device and type."""
    views = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta and tensor.layout == torch.strided:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            views[tensor.device, tensor.dtype].append(flat[:: -(-len(flat) // _SAMPLES)])
    return list(views.values())


def _bytes_of(views: list[Tensor]) -> bytes:
    with torch.inference_mode():
        return torch.cat(views).view(torch.uint8).cpu().numpy().tobytes()
