"""Small modules in the OpenVINO runtime, as the OpenVINO backend runs a network's steps."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim

from monge.core.errors import BackendError
from monge.core.model import Forward
from monge.engine.apart import apart
from monge.engine.compiled_store import module_key
from monge.engine.module_export import export_module, module_difference
from monge.engine.openvino import AGREEMENT, FAILURES, load_or_export, openvino_version
from monge.engine.openvino_export import weights
from monge.engine.openvino_paths import run_as_language_model
from monge.engine.openvino_products import Held, place_weights
from monge.engine.openvino_program import runtime_options
from monge.engine.step import Notify

_FORMAT: Final = "openvino module 1"  # raised whenever what is traced, or the file, change


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What a module reads and writes, shared with the runtime, for one number of rows."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    shared: tuple[tuple[Any, ...], tuple[Any, ...]]


class OpenVinoModule:
    """A module run by OpenVINO.

    Args:
        graph: An `openvino.Model` with its weights.
    """

    def __init__(self, graph: Any) -> None:
        import openvino

        self._host: Any = openvino
        self._request = openvino.Core().compile_model(graph, "CPU", runtime_options("f32")).create_infer_request()
        self._widths = [[int(port.partial_shape[1].get_length()) for port in ports] for ports in (graph.inputs, graph.outputs)]
        self._buffers: dict[int, _Buffers] = {}
        self._rows = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        buffers = self._bound(len(inputs[0]))
        for buffer, tensor in zip(buffers.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self._request.infer(share_outputs=True)
        # Copies: the next call writes its own to the same place.
        return tuple(tensor.clone() for tensor in buffers.outputs)

    def _bound(self, rows: int) -> _Buffers:
        if rows not in self._buffers:
            with torch.inference_mode(False):  # written to both inside and outside of that mode
                inputs, outputs = (tuple(torch.zeros(rows, width) for width in widths) for widths in self._widths)
            seen = [tuple(self._host.Tensor(tensor.numpy(), shared_memory=True) for tensor in one) for one in (inputs, outputs)]
            self._buffers[rows] = _Buffers(inputs=inputs, outputs=outputs, shared=(seen[0], seen[1]))
        buffers = self._buffers[rows]
        if rows != self._rows:
            for index, shared in enumerate(buffers.shared[0]):
                self._request.set_input_tensor(index, shared)
            for index, shared in enumerate(buffers.shared[1]):
                self._request.set_output_tensor(index, shared)
            self._rows = rows
        return buffers


def openvino_module(notify: Notify, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
    """A module in OpenVINO, exported, or loaded where that was done before; either way checked against the module itself.

    Args:
        notify: Told what takes long.
        module: See `ModuleHost.hosted`.
        like: Likewise; float32.

    Raises:
        BackendError: If it cannot run here; the message says why.
    """
    name = type(module).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's and the converter's own, about themselves
            key = module_key(module, like, _FORMAT, openvino_version())
            graph = load_or_export(key, name, notify, lambda: _export(module, like))
            _complete(graph, module, like)
            run_as_language_model(graph)
            program = OpenVinoModule(graph)
            difference, bound = apart(lambda: module_difference(module, program, like)), AGREEMENT["f32"]
    except FAILURES as error:
        text = str(error).strip().splitlines() or [""]
        raise BackendError(f"{name} cannot run in OpenVINO: {type(error).__name__}: {' '.join(text)[:300]}") from error
    if not difference <= bound:
        raise BackendError(f"{name}, run by OpenVINO, gives other numbers: {difference:.2g} of the largest, not {bound:.2g}")
    return program


class _Open(torch.nn.Module):
    """A module with its own weights as inputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module, self._names = module, tuple(weights(module))

    def forward(self, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.func.functional_call(self._module, dict(zip(self._names, values, strict=True)), tuple(inputs))


def _export(module: torch.nn.Module, like: Sequence[Tensor]) -> Any:
    import openvino

    inputs, values = [tensor.new_zeros(3, tensor.shape[1]) for tensor in like], list(weights(module).values())
    shapes = ([{0: Dim.DYNAMIC} for _ in inputs], [None for _ in values])
    return openvino.convert_model(export_module(_Open(module).eval(), (inputs, values), shapes))


def _complete(graph: Any, module: torch.nn.Module, like: Sequence[Tensor]) -> None:
    """Put the weights in the place of the graph's last inputs, and the widths of the others that the converter forgets."""
    import openvino

    for parameter, tensor in zip(graph.get_parameters(), like, strict=False):
        parameter.set_partial_shape(openvino.PartialShape([-1, tensor.shape[1]]))
    place_weights(graph, [Held(tensor=tensor, kind="same") for tensor in weights(module).values()])
