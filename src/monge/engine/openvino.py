"""The OpenVINO backend: a network's step over tree nodes by the OpenVINO runtime."""

import importlib.util
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.engine.apart import apart
from monge.engine.cache import TreeCache
from monge.engine.compiled_store import find_program, program_key, scratch_folder, store_program
from monge.engine.network_facts import num_weights, tree_obstacle
from monge.engine.openvino_buffers import Buffers
from monge.engine.openvino_export import export_graph, weights
from monge.engine.openvino_products import Held, place_weights
from monge.engine.openvino_program import Program
from monge.engine.openvino_weights import linear_weights
from monge.engine.step import Notify, StepOutput, StepSpec
from monge.engine.step_check import largest_difference, step_spec

_FORMAT: Final = "openvino graph 2"  # raised whenever the traced graph, its inputs or the file change
AGREEMENT: Final = {"f32": 1e-4, "bf16": 0.1}
"""Largest difference to the network's own logits, as a share of the largest logit, by type of arithmetic."""
FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, OSError, ImportError)
_FEW: Final = (1, 2, 4, 8)
"""Numbers of nodes that have programs of their own."""
_PATIENCE: Final = 6
"""Steps in a row for which a program is kept that is larger than they need: another one's weights are not in the processor's
cache, and up to four nodes cost little more than one."""
_CHEAP: Final = 4
_SMALL: Final = 2**24
"""Numbers in a network that has such programs. Each holds all weights; of a longer step they would save little."""


class OpenVinoStep:
    """A step run by OpenVINO, a `NodeStep`. The cache is read where it lies; new keys and values are copied into it.

    Blocks of one row with few nodes are run by programs of their own where the network is small, with the next larger
    number of nodes that has one, or a while that of the step before; a program is compiled when it is first needed.

    Args:
        graph: An `openvino.Model` with its weights.
        spec: Shape of its inputs, and the hidden states that it gives.
        name: What runs, for tables of results.
        precision: Type of its arithmetic.
        few: Numbers of nodes that have programs of their own, in order.
    """

    def __init__(self, graph: Any, spec: StepSpec, name: str, precision: str, few: tuple[int, ...] = ()) -> None:
        self.name, self.layers = name, spec.layers
        self._few = few
        self._programs: dict[int | None, Program] = {None: Program(graph, spec, precision)}
        self._last = self._num_smaller = 0
        # What makes no further programs is not to keep the weights twice.
        self._own = partial(Program, graph, spec, precision) if few else None

    def __call__(self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache) -> StepOutput:
        rows, count = token_ids.shape
        nodes, starts = self._lengthened(rows, count), cache.starts

        def fill(buffers: Buffers) -> None:
            buffers.fill(token_ids.numpy(), positions.numpy(), [mask.numpy() for mask in masks], starts)

        return self._run((rows, nodes), count, cache, fill)

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> StepOutput:
        count = len(token_ids)

        def fill(buffers: Buffers) -> None:
            buffers.fill_chain(token_ids, start)

        return self._run((1, self._lengthened(1, count)), count, cache, fill)

    def _run(self, sizes: tuple[int, int], count: int, cache: TreeCache, fill: Callable[[Buffers], None]) -> StepOutput:
        rows, nodes = sizes
        own = nodes if rows == 1 and nodes in self._few else None
        if own not in self._programs and self._own is not None:
            self._programs[own] = self._own(own)
        first = self._programs[own].run(sizes, cache.kept(), fill).first(count)
        cache.write(first.new)
        # Copies: the next step writes its own to the same place.
        return StepOutput(logits=first.logits.clone(), states=tuple(state.clone() for state in first.states))

    def _lengthened(self, rows: int, count: int) -> int:
        """Nodes to run for a block of `count`."""
        if rows > 1:
            self._last = 0
            return count
        fitting = next((few for few in self._few if few >= count), count)
        is_smaller = fitting < self._last <= _CHEAP
        self._num_smaller = self._num_smaller + 1 if is_smaller else 0
        if not 0 < self._num_smaller <= _PATIENCE:
            self._last, self._num_smaller = fitting, 0
        return self._last


def openvino_step(network: PreTrainedModel, weights_kind: str, notify: Notify, layers: tuple[int, ...] = ()) -> OpenVinoStep:
    """A network's step in OpenVINO, exported, or loaded where that was done before; either way checked against the network.

    Args:
        network: A network in evaluation mode whose weights are of the kind, see `openvino_weights.with_weights`.
        weights_kind: How weights of linear maps are held, one of `openvino_weights.WEIGHTS`.
        notify: Told what takes long.
        layers: Hidden states that come with the logits.

    Raises:
        BackendError: If the network cannot run here; the message says why.
    """
    if (reason := obstacle(network)) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    precision = "bf16" if weights_kind == "bf16" and _has_bfloat16() else "f32"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's and the converter's own, about themselves
            spec = step_spec(network, layers)
            key = program_key(network, spec, _FORMAT, openvino_version())
            what = f"{name} with its hidden states" if layers else name
            graph = load_or_export(key, what, notify, lambda: export_graph(network, spec))
            _set_weights(graph, network, weights_kind)
            title = "openvino" if weights_kind == "same" else f"openvino, {weights_kind} weights"
            is_small = num_weights(network) <= _SMALL
            step = OpenVinoStep(graph, spec, title, precision, _FEW if is_small else ())
            difference, bound = apart(lambda: largest_difference(network, step)), AGREEMENT[precision]
    except FAILURES as error:
        text = str(error).strip().splitlines() or [""]
        raise BackendError(f"{name} cannot run in OpenVINO: {type(error).__name__}: {' '.join(text)[:300]}") from error
    if not difference <= bound:
        what = "logits or hidden states" if layers else "logits"
        raise BackendError(
            f"{name}, run by OpenVINO, has other {what} than the network: {difference:.2g} of the largest, not {bound:.2g}"
        )
    return step


def obstacle(network: PreTrainedModel) -> str | None:
    """Why a network cannot run in OpenVINO, where that is known before trying."""
    if (reason := tree_obstacle(network)) is not None:
        return f"{reason}; OpenVINO runs networks that read trees, backend='eager' runs all"
    name, attention = type(network).__name__, str(network.config.get_text_config()._attn_implementation)
    if network.device.type != "cpu":
        return f"{name} is on {network.device}, and OpenVINO runs on the CPU here"
    if network.dtype != torch.float32:
        return (
            f"{name} has weights of type {network.dtype}, and OpenVINO takes float32 here: load it with dtype='float32'; "
            "openvino(weights='bf16') then holds the same numbers in half the room where the processor can"
        )
    if attention not in {"eager", "sdpa"}:
        return f"{name} runs attention {attention!r}; OpenVINO takes eager and sdpa"
    return None


def require_openvino() -> None:
    """Check that the runtime is installed.

    Raises:
        BackendError: If it is not; the message names the extra.
    """
    if importlib.util.find_spec("openvino") is None:
        raise BackendError("backend 'openvino' needs the package openvino: pip install 'monge[openvino]'")


def openvino_version() -> str:
    """Version of the runtime."""
    import openvino

    return str(openvino.get_version())


def load_or_export(key: str, name: str, notify: Notify, export: Callable[[], Any]) -> Any:
    """The stored graph, or a new one, which is kept if there is room.

    Args:
        key: Its name in the store.
        name: What it computes, for messages.
        notify: Told what takes long.
        export: Makes it.
    """
    stored, damage = find_program(key, ".zip")
    if damage is not None:
        notify(f"the stored graph of {name} cannot be used: {damage}")
    if stored is not None:
        return _read(stored.path)
    version = openvino_version()
    notify(f"exporting {name} for OpenVINO {version}, once for this model and these versions; it can take a minute")
    graph = export()
    try:
        with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
            store_program(key, _packed(graph, Path(scratch)), {})
    except (OSError, RuntimeError) as error:
        notify(f"the graph of {name} cannot be kept, the next start exports again: {error}")
    return graph


def _packed(graph: Any, folder: Path) -> Path:
    import openvino

    package, xml, numbers = folder / "graph.zip", folder / "graph.xml", folder / "graph.bin"
    openvino.serialize(graph, xml, numbers)
    with zipfile.ZipFile(package, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for file in (xml, numbers):
            archive.write(file, file.name)
    return package


def _read(path: Path) -> Any:
    import openvino

    with zipfile.ZipFile(path) as archive:
        text, numbers = archive.read("graph.xml"), archive.read("graph.bin")
    return openvino.Core().read_model(text, openvino.Tensor(np.frombuffer(numbers, dtype=np.uint8).copy()))


def _set_weights(graph: Any, network: PreTrainedModel, kind: str) -> None:
    """Put the network's weights in the place of the graph's last inputs."""
    named, linear = weights(network), linear_weights(network)
    tensors = network.state_dict(keep_vars=True)
    kinds = {name: kind if id(tensors[name]) in linear else "same" for name in named}
    place_weights(graph, [Held(tensor=tensor, kind=kinds[name]) for name, tensor in named.items()])


def _has_bfloat16() -> bool:
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
