"""The compiled backend on a GPU: forwards captured as CUDA graphs, replayed without Python or launches in between."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.backends.parity_check import (
    as_backend_error,
    check_forward,
    check_module,
    program_obstacle,
    program_spec,
)
from monge.backends.traced import TracedForward, UncompiledForward, all_nodes
from monge.core.errors import BackendError
from monge.core.model import CachedStep, Forward
from monge.engine.models.forward_program import ForwardOutput, ForwardProgram, ProgramSpec
from monge.engine.models.tree_cache import TreeCache
from monge.engine.notices import notify

WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Nodes a row for which graphs are captured."""
_MAX_GRAPHS: Final = 64  # the least recently used graph is dropped: batches come in many sizes

Outputs = tuple[Tensor, ...]
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Captures work that always uses the same memory; returns the replay and the tensors of its results."""


class GraphCapture:
    """Captures CUDA graphs that share one memory pool; a `Capture`.

    Raises:
        BackendError: If the device is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendError(
                f"steps on {device} are neither compiled nor captured: that is done on CPUs and "
                "CUDA devices"
            )
        self._device = device
        # A bare handle would end with the last graph, although later graphs are to share it.
        self._pool: Any = torch.cuda.MemPool()

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        with torch.cuda.device(self._device):
            # Libraries initialize themselves at first use, which cannot be captured.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: a server decodes in one and answers in
            # others.
            with torch.cuda.graph(graph, pool=self._pool.id, capture_error_mode="thread_local"):
                outputs = work()
        return graph.replay, outputs


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured step: the memory of its inputs, its replay, the memory of its outputs.

    `constants` is whatever else the replay reads: memory that nobody holds is given to others.
    """

    inputs: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    replay: Callable[[], None]
    outputs: Outputs
    constants: tuple[object, ...]

    def run(self, inputs: Sequence[Tensor], masks: Sequence[Tensor]) -> Outputs:
        """Copy the inputs in, replay, copy the outputs out: the next replay overwrites them."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        for own, mask in zip(self.masks, masks, strict=True):
            own.fill_(False if own.dtype == torch.bool else torch.finfo(own.dtype).min)
            own[..., : mask.shape[-1]] = mask
        self.replay()
        return tuple(output.clone() for output in self.outputs)


class CudaGraphForward(ForwardProgram):
    """A step with one CUDA graph for each slice of rows and each width, captured at first use.

    A graph attends to all columns of the cache, because shapes are fixed; the mask hides unused
    columns. When the cache moves to other memory, graphs are captured anew.
    """

    name = "cuda_graph"
    widths = WIDTHS

    def __init__(self, module: TracedForward, spec: ProgramSpec, capture: Capture) -> None:
        self.module, self.spec, self._capture = module, spec, capture
        self._uncaptured = UncompiledForward(module, spec)
        self._layout: object = None
        self._graphs: OrderedDict[tuple[int, int, int], CapturedGraph] = OrderedDict()
        self._has_memory = True

    def __call__(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        if cache.layout is not self._layout:
            self.clear()
            self._layout = cache.layout
        inputs = token_ids, positions, cache.columns(token_ids.shape[1])
        key = cache.rows.start, cache.rows.stop, token_ids.shape[1]
        if key not in self._graphs and self._has_memory:
            self._add(key, inputs, cache)
        if (graph := self._graphs.get(key)) is None:
            return self._uncaptured(token_ids, positions, masks, cache)
        self._graphs.move_to_end(key)
        logits, *states = graph.run(inputs, masks)
        return ForwardOutput(logits=logits, states=tuple(states))

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def _add(
        self, key: tuple[int, int, int], inputs: tuple[Tensor, Tensor, Tensor], cache: TreeCache
    ) -> None:
        try:
            self._graphs[key] = self._captured(inputs, cache)
        except torch.OutOfMemoryError as error:
            self._has_memory = False
            (rows, nodes), mebibytes = inputs[0].shape, cache.num_bytes / 2**20
            warnings.warn(
                f"no memory for the CUDA graph of {rows} requests by {nodes} nodes with "
                f"{mebibytes:.0f} MiB of keys and values; {len(self._graphs)} graphs are captured, "
                f"other sizes run eagerly: {error}",
                stacklevel=6,
            )
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _captured(self, inputs: tuple[Tensor, Tensor, Tensor], cache: TreeCache) -> CapturedGraph:
        token_ids, positions, columns = (tensor.clone() for tensor in inputs)
        rows, nodes = token_ids.shape
        # Any mask does for capturing, but a query that sees no column has no attention weights.
        mask = torch.ones(
            rows, 1, nodes, cache.capacity, dtype=self.spec.mask_dtype, device=token_ids.device
        )
        masks = tuple(mask.clone() for _ in self.spec.kinds)
        places, kept = (positions, columns, all_nodes(token_ids)), cache.kept()
        replay, outputs = self._capture(lambda: self.module(token_ids, places, masks, kept))
        return CapturedGraph(
            (token_ids, positions, columns), masks, replay, outputs, (*places, *kept)
        )


class ModuleGraph:
    """A small module beside a network, with one CUDA graph for each number of rows of `WIDTHS`, captured at first use."""

    def __init__(self, module: torch.nn.Module, capture: Capture) -> None:
        self._module, self._capture = module, capture
        self._graphs: dict[int, CapturedGraph] = {}

    def __call__(self, *inputs: Tensor) -> Outputs:
        rows = len(inputs[0])
        width = next((width for width in WIDTHS if width >= rows), None)
        if width is None:
            return self._module(*inputs)
        with torch.inference_mode():
            if width not in self._graphs:
                self._graphs[width] = self._captured(inputs, width)
            graph = self._graphs[width]
            for own, given in zip(graph.inputs, inputs, strict=True):
                own[:rows].copy_(given, non_blocking=True)
            graph.replay()
            return tuple(output[:rows].clone() for output in graph.outputs)

    def _captured(self, inputs: Sequence[Tensor], width: int) -> CapturedGraph:
        own = tuple(given.new_zeros(width, *given.shape[1:]) for given in inputs)
        replay, outputs = self._capture(lambda: self._module(*own))
        return CapturedGraph(own, (), replay, outputs, ())


def capture_module(capture: Capture, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
    """Make a module's graphs, and check them against the module; see `ModuleHost.module_program`.

    Raises:
        BackendError: If the module cannot be captured; the message gives the reason.
    """
    if isinstance(module, CachedStep):
        return module
    program = ModuleGraph(module, capture)
    with as_backend_error(f"{type(module).__name__} cannot be captured"):
        check_module(module, program, like, "captured")
    return program


def capture_forward(
    network: PreTrainedModel, capture: Capture, layers: tuple[int, ...] = ()
) -> CudaGraphForward:
    """Make the forward of a network whose graphs are captured while decoding, and check it against the network.

    Args:
        network: A network in evaluation mode.
        capture: Captures work on its device.
        layers: Hidden states that come with the logits.

    Raises:
        BackendError: If the network cannot be captured; the message gives the reason.
    """
    if (reason := program_obstacle(network, "captured")) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    notify(f"capturing CUDA graphs of {name}; each size is captured at first use")
    with as_backend_error(f"{name} cannot be captured"):
        spec = program_spec(network, layers)
        step = CudaGraphForward(TracedForward(network, spec), spec, capture)
        check_forward(network, step, "captured")
        step.clear()  # these graphs point to a cache that no longer exists
    return step
