"""A device that is not there: tensors on it lie in ordinary memory, and every operation is watched.

What runs on it is what would run on an accelerator, with three things made visible that need one to
go wrong: an operation on tensors of two devices raises, a number that the host waits for is
counted, and recorded work that waits for one raises.
"""

import copy
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from traceback import walk_stack

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "meta"
"""The name of torch's device without memory.

Every build has it, and no other test of the process notices that it is used.
"""
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
WAITS |= {"aten::_unique2", "aten::unique_dim"}

waits = Counter()
"""Numbers that the host waited for, by the line of the library that asked."""
_recording = threading.local()


class Tensor(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, held):
        # Not of inference mode: views of a tensor that was made outside could not be written to.
        with torch.inference_mode(mode=False):
            layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
            kind = {"dtype": held.dtype, "device": NAME}
            return torch.Tensor._make_wrapper_subclass(cls, held.size(), **layout, **kind)

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"{NAME}({self.held})"

    def tolist(self):
        _wait("tolist")
        return self.held.tolist()

    def numpy(self, **_):
        raise TypeError(f"a tensor on {NAME} has no numpy array; copy it to the host first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def placed(model, device):
    """A copy of a network on the device."""
    return copy.deepcopy(model).to(device)


@contextmanager
def device() -> Iterator[str]:
    """Make the device known for a while; gives its name, and forgets what was counted."""
    waits.clear()
    with ExitStack() as stack:
        stack.enter_context(_Dispatch())
        stack.enter_context(_Makers())
        yield NAME


class Rerun:
    """A `Capture` that runs the work again, and puts what it gives where it lay the first time."""

    def __init__(self):
        self.num_captured = 0

    def __call__(self, work):
        self.num_captured += 1
        _recording.is_on = True
        try:
            outputs = work()
        finally:
            _recording.is_on = False

        def repeat():
            for held, new in zip(outputs, work(), strict=True):
                held.copy_(new)

        for output in outputs:
            # Recorded, and not run yet.
            output.fill_(float("nan") if output.is_floating_point() else -1)
        return repeat, outputs


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """Tensors of Python numbers are made out of sight of the other mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in {torch.tensor, torch.as_tensor} and _is_ours(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(NAME)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], Tensor):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = [torch.tensor(one).to(NAME) if isinstance(one, list) else one for one in places]
            return func(args[0], tuple(lists))
        if func is torch.Tensor.new_tensor and isinstance(args[0], Tensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(NAME)
        return func(*args, **kwargs)


def _run(func, args, kwargs):
    tensors = list(_tensors((*args, *kwargs.values())))
    ours = [one for one in tensors if isinstance(one, Tensor)]
    if not ours and not any(
        isinstance(one, torch.device) and _is_ours(one) for one in (*args, *kwargs.values())
    ):
        return func(*args, **kwargs)  # the host's own
    name = func._schema.name
    if _can_decompose(func):
        with _Dispatch():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if name == "aten::_to_copy":
        return _moved(func, args, kwargs)
    if ours and name == "aten::copy_":
        is_crossing = isinstance(args[0], Tensor) is not isinstance(args[1], Tensor)
        if not isinstance(args[0], Tensor) or (
            is_crossing and not _is_asynchronous(args[2:], kwargs)
        ):
            _wait(name)
    elif ours:
        strangers = [one for one in tensors if not isinstance(one, Tensor) and one.ndim]
        shapes = [tuple(one.shape) for one in strangers]
        assert not strangers, f"{name} has tensors of two devices: {shapes} are on the host"
        picks = name == "aten::index" and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if name in WAITS or picks:
            _wait(name)
    if _is_ours(kwargs.get("device")):
        kwargs = {**kwargs, "device": "cpu"}
    if name == "aten::histc":
        args = (args[0].float(), *args[1:])  # of whole numbers an accelerator makes it too
    plain = {key: _each(_held, one) for key, one in kwargs.items()}
    result = func(*_each(_held, args), **plain)
    if name == "aten::_local_scalar_dense":
        return result
    if func._schema.is_mutable and isinstance(result, torch.Tensor):
        return args[0]
    return _each(_placed, result)


@cache
def _can_decompose(func):
    return func._can_decompose()


def _tensors(values):
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _each(change, value):
    """Arguments and results of an operation are nested in lists and tuples only."""
    if isinstance(value, list | tuple):
        return type(value)([_each(change, one) for one in value])
    return change(value)


def _held(one):
    return one.held if isinstance(one, Tensor) else one


def _placed(one):
    return Tensor(one) if isinstance(one, torch.Tensor) else one


def _moved(func, args, kwargs):
    source = args[0]
    goal = kwargs.get("device", source.device)
    moved = func(_held(source), **{**kwargs, "device": "cpu"})
    if _is_ours(goal):
        if not isinstance(source, Tensor) and not kwargs.get("non_blocking"):
            _wait(func._schema.name)
        return Tensor(moved)
    if isinstance(source, Tensor):
        _wait(func._schema.name)
    return moved


def _is_asynchronous(args, kwargs):
    """Whether a copy to the device is begun only.

    What it copies is put by for it, so the host may go on.
    """
    return bool(args[0]) if args else bool(kwargs.get("non_blocking"))


def _wait(what):
    if getattr(_recording, "is_on", False):
        raise RuntimeError(f"{what}: the host waits for a number while the work is captured")
    for frame, line in walk_stack(None):
        name = frame.f_code.co_filename
        if "/monge/" in name and "/tests/" not in name:
            waits[name.rsplit("/monge/", 1)[1], line, what] += 1
            break


def _is_ours(device):
    return device is not None and torch.device(device).type == NAME
