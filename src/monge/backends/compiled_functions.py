"""Functions of tensors, such as verdicts, as few kernels: their many small operations take longer to launch than to compute.

Another process compiles a function that is called often. This one then takes it from the compiler's
cache, in one to three seconds: it would stand still otherwise, and the compiler cannot work beside it
in a thread.
"""

import copyreg
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from monge.core.sampling_rules import Decision, Recordable
from monge.engine.clock import note_preparation
from monge.engine.models.background_compiler import BackgroundCompiler
from monge.engine.notices import notify

_MANY_CALLS: Final = 1000
"""Calls of a function before it is compiled: each saves up to a millisecond, and taking it over stalls a round for one
to three seconds."""
_EXPECTED_S: Final = 10  # half of what the process takes
_SHARE: Final = 0.1
"""Largest share of the free memory that the inputs of a function may take in another process."""

Form = Callable[..., Tensor]
"""A `Decision`, or its compiled form."""
Compile = Callable[[Decision, Sequence[Tensor]], Form]
"""Compiles a function for inputs of these shapes and types."""


def compile_function(function: Decision, inputs: Sequence[Tensor]) -> Form:
    """Trace a function, and compile the trace; a `Compile`.

    The compiled form asks nothing of its inputs, since it is called with those of one kind only: it
    would be compiled anew inside and outside of inference mode.
    """
    # Made now: the trace would take the copies to the device for a part of the function.
    function.constants(inputs[0].device)
    settings: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    # Of one mode: what another process compiled for tensors of another mode is not found in the cache.
    with (
        torch.inference_mode(mode=False),
        torch.no_grad(),
        _same_keys(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the compiler warns about itself
        examples = [
            tensor.clone() if tensor.is_inference() else tensor.contiguous() for tensor in inputs
        ]
        trace = make_fx(function)(*examples)
        form = torch.compile(trace, dynamic=False, fullgraph=True, options=settings)
        form(*examples)
    return lambda *given: form(*(tensor.contiguous() for tensor in given))


@contextmanager
def _same_keys() -> Iterator[None]:
    """Let the compiler's cache give one key to one program in all processes.

    Pickled as they are, memory formats of its inputs name the module that imported torch first.
    """
    copyreg.pickle(torch.memory_format, lambda kind: (_memory_format, (str(kind),)))  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(torch.memory_format, None)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name.removeprefix("torch."))


class FunctionCompiler:
    """Compiles what functions decide by, once for all functions that share it.

    Args:
        compile: Compiles a function.
        many_calls: Calls of a function with the same shapes after which it is compiled.
        is_elsewhere: Whether another process compiles first.
    """

    def __init__(
        self,
        compile: Compile = compile_function,
        many_calls: int = _MANY_CALLS,
        *,
        is_elsewhere: bool = True,
    ) -> None:
        self._compile, self._many_calls = compile, many_calls
        self._is_elsewhere, self._num_calls = is_elsewhere, Counter[Hashable]()
        # By shapes of a function's inputs and of those of `decide`, which several functions share.
        self._keys = dict[Hashable, Hashable]()
        self._processes = dict[Hashable, BackgroundCompiler]()
        self._forms = dict[Hashable, Form]()

    def form(self, function: Recordable, inputs: Sequence[Tensor]) -> Form | None:
        """Count a call, and return the compiled form of `function.decide` for inputs of these shapes.

        It is `function.decide` itself where that cannot be compiled, and `None` while that is not known.
        """
        given = function.decide, *_shapes(inputs)
        if given not in self._keys:
            self._keys[given] = function.decide, *_shapes(function.prepare(*inputs))
        key = self._keys[given]
        if key not in self._forms:
            self._num_calls[key] += 1
            is_rare = self._num_calls[key] <= self._many_calls
            if is_rare or self._is_waiting(key, function, inputs):
                return None
            self._forms[key] = function.decide if self._has_failed else self._made(function, inputs)
        return self._forms[key]

    @property
    def _has_failed(self) -> bool:
        """True if another process has failed: the next one would too."""
        return any(process.has_failed for process in self._processes.values())

    def _is_waiting(self, key: Hashable, function: Recordable, inputs: Sequence[Tensor]) -> bool:
        if not self._is_elsewhere or self._has_failed:
            return False
        if key not in self._processes:
            if any(process.is_busy(()) for process in self._processes.values()):
                return True
            prepared = function.prepare(*inputs)
            if not _has_room(prepared):
                self._num_calls[key] = 0  # asked again later
                return True
            arguments = {
                "function": function.decide,
                "shapes": _shapes(prepared),
                "device": str(prepared[0].device),
                "state": _global_state(),
            }
            self._processes[key] = BackgroundCompiler(compile_zeros, arguments)
        return self._processes[key].is_busy((_EXPECTED_S,))

    def _made(self, function: Recordable, inputs: Sequence[Tensor]) -> Form:
        note_preparation()
        decide, prepared = function.decide, function.prepare(*inputs)
        try:
            form = self._compile(decide, prepared)
            trials = decide.trials(*prepared)
            # Verdicts are whole numbers.
            are_equal = [(form(*trial) == decide(*trial)).all() for trial in trials]
            obstacle = None if bool(torch.stack(are_equal).all()) else "they would be others"
        except Exception as error:  # noqa: BLE001 (errors of compilers have no common class)
            form, obstacle = decide, f"{type(error).__name__}: {str(error)[:300]}"
        if obstacle is not None:
            notify(f"verdicts are not compiled: {obstacle}")
            return decide
        return form


def _shapes(inputs: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]


def _has_room(inputs: Sequence[Tensor]) -> bool:
    """Return whether another process may hold such inputs, and a few of their size, on the same device."""
    device = inputs[0].device
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(tensor.nbytes for tensor in inputs) < _SHARE * free


def _global_state() -> list[tuple[str, Any]]:
    """Return the setters of what the compiler's keys depend on in a process, by name, and their values."""
    state: list[tuple[str, Any]] = [
        ("set_num_threads", torch.get_num_threads()),
        ("set_default_dtype", torch.get_default_dtype()),
        ("set_float32_matmul_precision", torch.get_float32_matmul_precision()),
        ("use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled()),
    ]
    if torch.cuda.is_available():
        state.append(("cuda.set_device", torch.cuda.current_device()))
    return state


def compile_zeros(
    function: Decision,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    device: str,
    state: Sequence[tuple[str, Any]],
) -> None:
    """Compile a function for inputs of these shapes, so that the process that asks finds it in the compiler's cache."""
    present = _global_state()
    for setter, value in state:
        if (setter, value) not in present:  # what was set to its default has another key
            attrgetter(setter)(torch)(value)
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    compile_function(function, zeros)
