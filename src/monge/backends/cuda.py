"""The compiled backend on a GPU: forwards captured as CUDA graphs, replayed without Python or launches in between."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from monge.backends.chain_graphs import ChainGraph, is_chain
from monge.backends.fused_layers import LayerCompiler
from monge.backends.parity_check import (
    as_backend_error,
    check_forward,
    forward_spec,
    why_no_fast_forward,
)
from monge.backends.prompt_graphs import MOST_TOKENS, PromptGraphs
from monge.backends.traced import TracedForward, UncompiledForward, all_nodes
from monge.core.errors import BackendError, UnsupportedModelError
from monge.laws.from_logits import KINDS
from monge.laws.levels import DrawnLevels, LevelDraws
from monge.networks.attention_masks import masks_behind
from monge.networks.base import Recordable
from monge.networks.forward import (
    FastForward,
    Forward,
    ForwardOutput,
    ForwardSpec,
    NetworkForward,
)
from monge.networks.tree_cache import TreeCache, power_of_two
from monge.runtime.clock import note_preparation
from monge.runtime.notices import notify

WIDTHS: Final = (1, 2, 3, 5, 9, 17, 33, 64)
"""Nodes a row for which graphs are captured: a root and a draft of a power of two, and 64 at most."""
MAX_GRAPHS: Final = 64  # the least recently used graph is dropped
_MOST_NODES: Final = 1024
"""Nodes of all rows for which graphs are captured: with more, arithmetic takes longer than launches."""
_FEW_FORWARDS: Final = 3
"""Forwards of a shape that was not prepared before it is captured: its layers are compiled for seconds then, and many a
shape comes once, such as the text that a draft model missed in a pause."""
_MAX_FUNCTIONS: Final = 256
_FEW_CALLS: Final = 32
"""Calls with the same shapes before a capture: it stalls a round, a replay saves a part of that."""
_MOST_NUMBERS: Final = 1 << 23
"""Most numbers that a captured function reads."""
_SHARE: Final = 0.25
"""Largest share of the free memory that keys and values take before there is a text."""

Outputs = tuple[Tensor, ...]
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Captures work that always uses the same memory; returns the replay and the tensors of its results."""


class GraphCapture:
    """Captures CUDA graphs that share a memory pool; a `Capture`.

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

    `constants` is whatever else the replay reads: memory without a reference is reused.
    """

    inputs: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    replay: Callable[[], None]
    outputs: Outputs
    constants: tuple[object, ...]

    def run(self, rows: slice, inputs: Sequence[Tensor], masks: Sequence[Tensor]) -> Outputs:
        """Copy the inputs of some rows in, replay, copy their outputs out: the next replay overwrites them.

        All other rows are padding: they write and see the last columns of the cache, which no text
        fills.
        """
        token_ids, _, columns = self.inputs
        width, is_padded = token_ids.shape[1], rows.stop - rows.start < len(token_ids)
        for static, given in zip(self.inputs, inputs, strict=True):
            if is_padded and static is columns:
                static.copy_(_spare_columns(self.masks[0].shape[-1], static))
            static[rows].copy_(given, non_blocking=True)
        for static_mask, mask in zip(self.masks, masks, strict=True):
            is_bool = static_mask.dtype == torch.bool
            hidden, shown = (False, True) if is_bool else (torch.finfo(static_mask.dtype).min, 0.0)
            static_mask.fill_(hidden)
            if is_padded:
                # A query that sees no column gives no numbers.
                static_mask[: rows.start, ..., -width:] = shown
                static_mask[rows.stop :, ..., -width:] = shown
            static_mask[rows, ..., : mask.shape[-1]] = mask
        self.replay()
        return tuple(output[rows].clone() for output in self.outputs)


def _spare_columns(capacity: int, like: Tensor) -> Tensor:
    """The last columns of a cache, `[rows, nodes]`."""
    width = like.shape[1]
    return torch.arange(capacity - width, capacity, device=like.device).expand_as(like)


@dataclass(slots=True)
class _Known:
    """A function with shapes of its inputs.

    Attributes:
        num_calls: Its calls so far.
        graph: Its graph, if it is captured.
    """

    num_calls: int = 0
    graph: CapturedGraph | None = None


class FunctionGraphs:
    """Runs functions of tensors, and those that come again as CUDA graphs; a `Recorder`.

    Functions of many numbers are not captured: their arithmetic takes longer than launches.

    Args:
        capture: Captures work on the device.
        few_calls: Calls of a function with the same shapes that are not worth a graph.
    """

    def __init__(self, capture: Capture, few_calls: int = _FEW_CALLS) -> None:
        self._capture, self._few_calls = capture, few_calls
        self._functions = OrderedDict[Hashable, _Known]()
        self._has_memory = True

    def __call__(self, function: Recordable, inputs: Sequence[Tensor]) -> Tensor:
        key = function, *((tensor.shape, tensor.dtype) for tensor in inputs)
        known = self._functions.setdefault(key, _Known())
        self._functions.move_to_end(key)
        if len(self._functions) > _MAX_FUNCTIONS:
            self._functions.popitem(last=False)
        known.num_calls += 1
        is_rare = known.num_calls <= self._few_calls
        is_small = sum(tensor.numel() for tensor in inputs) <= _MOST_NUMBERS
        # Of trees whose shape depends on the text, most come once: nothing is kept of them.
        if known.graph is None and is_small and not is_rare and self._has_memory:
            known.graph = self._captured(function, inputs)
        if (graph := known.graph) is None:
            return function(*inputs)
        for static, given in zip(graph.inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        graph.replay()
        return graph.outputs[0].clone()

    def _captured(self, function: Recordable, inputs: Sequence[Tensor]) -> CapturedGraph | None:
        static_inputs = tuple(tensor.clone() for tensor in inputs)
        constants = function, function.constants(inputs[0].device)
        try:
            replay, outputs = captured(self._capture, lambda: (function(*static_inputs),))
        except torch.OutOfMemoryError as error:
            self._has_memory = False
            warnings.warn(
                f"no memory for more CUDA graphs; verification is launched: {error}", stacklevel=6
            )
            return None
        return CapturedGraph(static_inputs, (), replay, outputs, constants)


class CudaGraphForward(FastForward):
    """A step with CUDA graphs; rows are padded to powers of two, nodes to `WIDTHS`.

    Graphs are captured by `prepare`, and others once their shape has come a few times. Blocks of
    more nodes than `_MOST_NODES` run uncaptured. The first tokens of short prompts have graphs of
    their own, see `PromptGraphs`. A graph attends to all columns of the cache, because shapes are
    fixed; the mask hides unused columns. When the cache moves to other memory, as it does for a text
    that outgrows it, graphs are captured anew.

    Args:
        eager: The network.
        spec: Shapes and types of its inputs.
        module: The step that is captured.
        capture: Captures it.
        uncaptured: The step that runs without a graph; `module` by default. Pass a step without
            compiled layers, so that a shape that occurs once does not compile them.
    """

    name = "cuda_graph"
    widths = WIDTHS
    prompt_tokens = MOST_TOKENS

    def __init__(
        self,
        eager: NetworkForward,
        spec: ForwardSpec,
        module: TracedForward,
        capture: Capture,
        uncaptured: TracedForward | None = None,
    ) -> None:
        super().__init__(eager, spec)
        self.module, self._capture, self.record = module, capture, FunctionGraphs(capture)
        self._uncaptured = UncompiledForward(eager, spec, uncaptured or module)
        self._prompts = PromptGraphs(partial(captured, capture), self._uncaptured.module, spec)
        self._layout: object = None
        self._chains: dict[tuple[int, str], ChainGraph] = {}
        self._graphs: OrderedDict[tuple[int, int], CapturedGraph] = OrderedDict()
        self._prepared = set[tuple[int, int | str]]()
        self._num_calls = Counter[tuple[int, int]]()
        self._has_memory, self._has_told = True, False

    def read(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput:
        graph = self._graph(power_of_two(cache.rows.stop), token_ids.shape[1], cache)
        if graph is None:
            return self._uncaptured.read(token_ids, positions, masks, cache)
        inputs = token_ids, positions, cache.columns(token_ids.shape[1])
        logits, *states = graph.run(cache.rows, inputs, masks)
        return ForwardOutput(logits=logits, states=tuple(states))

    def prepare(
        self, num_rows: int, num_nodes: int, cache: TreeCache, *, drafts: bool = False
    ) -> None:
        """See `NetworkForward`."""
        cache.lay_out(self.spec.cache_shapes, self.spec.dtype)
        if not cache.is_settled:
            return
        device, count = cache.device, self._num_graphs
        before = _reserved_bytes(device)
        num_rows = _affordable_rows(num_rows, self.spec, cache)
        try:
            cache.reserve(num_rows)
        except torch.OutOfMemoryError as error:
            warnings.warn(
                f"no memory for keys and values of {num_rows} requests, so CUDA graphs are "
                f"captured when they are needed: {error}",
                stacklevel=6,
            )
            return
        rows = [1 << power for power in range(num_rows.bit_length())]
        widest = next((width for width in WIDTHS if width >= num_nodes), WIDTHS[-1])
        nodes = [width for width in WIDTHS if width <= widest]
        shapes = [shape for shape in product(rows, nodes) if shape[0] * shape[1] <= _MOST_NODES]
        chains = list(product(rows, KINDS)) if drafts else []
        self._prepared |= {*shapes, *chains}
        for shape in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            self._graph(*shape, cache)
        for key in chains:
            self._chain(key, cache, None)
        if self._has_memory:
            self._add("prompts", cache, lambda: self._prompts.prepare(rows[-1], device))
        if (num_new := self._num_graphs - count) > 0:
            used = (_reserved_bytes(device) - before) / 2**20
            notify(
                f"{num_new} CUDA graphs captured for up to {rows[-1]} requests and {nodes[-1]} nodes, "
                f"{used:.0f} MiB with keys and values"
            )

    def read_prompt(
        self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> ForwardOutput | None:
        """See `FastForward`."""
        prompt_outputs = list[ForwardOutput | None]()
        if self._has_memory:
            self._add(
                "prompts",
                cache,
                lambda: prompt_outputs.append(self._prompts.read(token_ids, cache)),
            )
        return prompt_outputs[0] if prompt_outputs else None

    def draw_levels(
        self, given: LevelDraws, rows: slice, lengths: Sequence[int], cache: TreeCache
    ) -> DrawnLevels | None:
        """See `NetworkForward`: chains, with a graph for each number of rows and kind of rules."""
        if not is_chain(given.shape):
            return None
        # Padding too lies behind the texts.
        cache.place(rows, lengths, len(given.shape.widths))
        key = power_of_two(rows.stop), given.rules[0].kind
        chain = self._chain(key, cache, given.draft_ids)
        return None if chain is None else chain.draw(given, rows, lengths)

    @property
    def _num_graphs(self) -> int:
        return len(self._graphs) + len(self._chains) + len(self._prompts)

    def clear(self) -> None:
        """Drop the graphs that point to the cache."""
        self._graphs.clear()
        self._chains.clear()

    def _graph(self, num_rows: int, num_nodes: int, cache: TreeCache) -> CapturedGraph | None:
        """Return the graph of a shape, captured if it is wanted and there is memory for it."""
        self._follow(cache)
        key = num_rows, num_nodes
        if key not in self._graphs and self._has_memory:
            if num_rows * num_nodes > _MOST_NODES or self._is_rare(key):
                return None
            self._tell(key)
            self._add(key, cache, lambda: self._capture_forward(key, cache))
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def _is_rare(self, key: tuple[int, int]) -> bool:
        """Count a call of a shape, and return whether it is not worth a graph yet."""
        self._num_calls[key] += 1
        is_wanted = not self._prepared or key in self._prepared
        return not is_wanted and self._num_calls[key] <= _FEW_FORWARDS

    def _follow(self, cache: TreeCache) -> None:
        """Drop the graphs of a cache that has moved."""
        if cache.layout is not self._layout:
            self.clear()
            self._layout = cache.layout

    def _tell(self, key: tuple[int, int | str]) -> None:
        if self._prepared and key not in self._prepared and not self._has_told:
            self._has_told = True
            notify(
                f"{key[0]} requests by {_named(key[1])}: this decoder was prepared for fewer, so more CUDA "
                "graphs are captured while texts are written"
            )

    def _add(
        self, key: tuple[int, int | str] | str, cache: TreeCache, capture: Callable[[], None]
    ) -> None:
        try:
            capture()
        except torch.OutOfMemoryError as error:
            self._has_memory = False
            mebibytes = cache.num_bytes / 2**20
            what = key if isinstance(key, str) else f"{key[0]} requests by {_named(key[1])}"
            warnings.warn(
                f"no memory for the CUDA graph of {what} with {mebibytes:.0f} MiB of keys and "
                f"values; {self._num_graphs} graphs are captured, other sizes run eagerly: {error}",
                stacklevel=7,
            )
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture_forward(self, key: tuple[int, int], cache: TreeCache) -> None:
        (rows, nodes), kept = key, cache.kept(slice(0, key[0]))
        token_ids = torch.zeros(rows, nodes, dtype=torch.int64, device=cache.device)
        # What runs before it is captured writes where no text lies.
        columns = _spare_columns(cache.capacity, token_ids).clone()
        places = torch.zeros_like(token_ids), columns, all_nodes(token_ids)
        # Any mask does for capturing, but a query that sees no column has no attention weights.
        mask = torch.ones(
            rows, 1, nodes, cache.capacity, dtype=self.spec.mask_dtype, device=cache.device
        )
        masks = tuple(mask.clone() for _ in self.spec.kinds)
        replay, outputs = captured(
            self._capture, lambda: self.module(token_ids, places, masks, kept)
        )
        static_inputs = token_ids, *places[:2]
        self._graphs[key] = CapturedGraph(static_inputs, masks, replay, outputs, (*places, *kept))

    def _chain(
        self, key: tuple[int, str], cache: TreeCache, draft_ids: Tensor | None
    ) -> ChainGraph | None:
        self._follow(cache)
        chain = self._chains.get(key)
        is_known = chain is not None and chain.draft_ids is draft_ids
        if not is_known and self._has_memory:
            self._tell(key)
            self._add(key, cache, lambda: self._capture_chain(key, cache, draft_ids))
            return self._chains.get(key)
        return chain if is_known else None

    def _capture_chain(
        self, key: tuple[int, str], cache: TreeCache, draft_ids: Tensor | None
    ) -> None:
        (rows, kind), kept = key, cache.kept(slice(0, key[0]))
        columns = torch.arange(cache.capacity, device=cache.device)
        starts, shown = columns[-self.widths[-1]].repeat(rows), columns[:1].clone()
        spec = self.spec

        def read(token_ids: Tensor, lengths: Tensor) -> Tensor:
            places = lengths[:, None]
            masks = masks_behind(lengths, columns, spec.windows, spec.mask_dtype)
            return self.module(token_ids, (places, places, shown), masks, kept)[0]

        capture = partial(captured, self._capture)
        self._chains[key] = ChainGraph(capture, read, starts, kind, draft_ids)


def _named(nodes: int | str) -> str:
    return f"{nodes} nodes" if isinstance(nodes, int) else f"{nodes} chains"


def captured(capture: Capture, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Capture work, and note that the time of this round says nothing about later rounds."""
    note_preparation()
    # Also where graphs are captured outside of a forward.
    with torch.inference_mode():
        return capture(work)


def _affordable_rows(wanted: int, spec: ForwardSpec, cache: TreeCache) -> int:
    """Rows, a power of two, whose keys and values fill at most a quarter of the free memory."""
    rows = power_of_two(wanted)
    if cache.device.type != "cuda":
        return rows
    numbers = sum(heads * size for heads, size in spec.cache_shapes)
    row_bytes = cache.least_columns * numbers * spec.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(cache.device)
    while rows > 1 and rows * row_bytes > _SHARE * free:
        rows //= 2
    return rows


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def capture_forward(
    eager: NetworkForward, capture: Capture, compiler: LayerCompiler | None = None
) -> Forward[NetworkForward]:
    """Make the forward of a network by CUDA graphs, and check it against the network.

    Args:
        eager: A network in evaluation mode.
        capture: Captures work on its device.
        compiler: Compiles its layers; where it cannot, graphs run them as they are.

    Raises:
        BackendError: If the network cannot be captured; the message gives the reason.
    """
    network = eager.network
    if (reason := why_no_fast_forward(network, "captured")) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    with as_backend_error(f"{name} cannot be captured"):
        spec = forward_spec(network)
        plain = TracedForward(eager, spec)
    if compiler is not None and compiler.why_no_compiling is None:
        notify(f"compiling the layers of {name} for CUDA graphs, some seconds a size")
        try:
            with as_backend_error(f"the layers of {name} cannot be compiled"):
                compiled = TracedForward(eager, spec, compiler.adapt)
                return _checked(CudaGraphForward(eager, spec, compiled, capture, plain))
        except (BackendError, UnsupportedModelError) as error:
            compiler.stop_compiling(error)
    with as_backend_error(f"{name} cannot be captured"):
        return _checked(CudaGraphForward(eager, spec, plain, capture))


def _checked(step: CudaGraphForward) -> Forward[NetworkForward]:
    check_forward(step.network, step, "captured")
    step.clear()  # these graphs point to a cache that no longer exists
    return Forward(step)
