"""A compiled graph of a network's step, and the memory that it shares with the runtime."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from monge.engine.openvino_buffers import Buffers
from monge.engine.openvino_paths import run_as_language_model
from monge.engine.step import StepSpec

_KEPT_SIZES: Final = 32  # numbers of rows, nodes and columns whose memory is kept


class Program:
    """One way in which the runtime runs a step: for any number of rows and nodes, or for one row of so many nodes.

    The runtime works out the shapes of all operations at every call unless they are given, which is a good part of a step of a
    network of some million numbers, and more whenever they change. So small numbers of nodes have programs of their own; the
    columns of the cache, which change rarely, stay variable in all of them.

    Args:
        graph: An `openvino.Model` with its weights, left as it is.
        spec: Shape of its inputs, and the hidden states that it gives.
        precision: Type of its arithmetic.
        nodes: Number of nodes of the only row; `None` for any number of both.
    """

    def __init__(self, graph: Any, spec: StepSpec, precision: str, nodes: int | None = None) -> None:
        import openvino

        self._host: Any = openvino
        self._spec, self.nodes = spec, nodes
        self._first_kept = 2 + len(spec.kinds)
        self._widths = (
            int(graph.outputs[0].partial_shape[2].get_length()),
            int(graph.outputs[1].partial_shape[2].get_length()) if spec.layers else 0,
        )
        shaped = graph.clone()
        if nodes is not None:
            shaped.reshape(_shapes(spec, nodes, openvino.PartialShape))
        run_as_language_model(shaped)
        self._request = openvino.Core().compile_model(shaped, "CPU", runtime_options(precision)).create_infer_request()
        self._seen: tuple[int, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._buffers: dict[tuple[int, ...], Buffers] = {}

    def run(self, sizes: tuple[int, int], kept: Sequence[Tensor], fill: Callable[[Buffers], None]) -> Buffers:
        """Run the step; what it gives is overwritten by the next run.

        Args:
            sizes: Rows and nodes.
            kept: All columns of keys and values of these rows, as they lie.
            fill: Puts the inputs in their place.
        """
        self._show(kept)
        buffers = self._bound((*sizes, kept[0].shape[2]))
        fill(buffers)
        self._request.infer(share_outputs=True)
        return buffers

    def _show(self, kept: Sequence[Tensor]) -> None:
        """Show the runtime all columns of keys and values, unless it sees them already.

        It does not keep them alive, and is shown another place before it reads. Never some of the columns: what does not lie
        in one piece it copies, at every step, and to the place where it last read in one piece, which may be a cache that is
        gone.
        """
        place = (kept[0].data_ptr(), *kept[0].shape)
        if place == self._seen:
            return
        for index, tensor in enumerate(kept, start=self._first_kept):
            assert tensor.is_contiguous(), "rows of the cache lie in one piece"
            self._request.set_input_tensor(index, self._host.Tensor(tensor.numpy(), shared_memory=True))
        self._seen = place

    def _bound(self, sizes: tuple[int, int, int]) -> Buffers:
        """Memory for everything of these sizes but keys and values of the past, all known to the runtime."""
        if sizes not in self._buffers:
            if len(self._buffers) >= _KEPT_SIZES:
                self._buffers.clear()
            self._buffers[sizes] = Buffers.of(self._spec, sizes, self._widths, partial(self._host.Tensor, shared_memory=True))
        buffers = self._buffers[sizes]
        if sizes != self._sizes:
            for index, shared in enumerate(buffers.inputs):
                self._request.set_input_tensor(index, shared)
            for index, shared in enumerate(buffers.outputs):
                self._request.set_output_tensor(index, shared)
            self._sizes = sizes
        return buffers


def runtime_options(precision: str) -> dict[str, Any]:
    """How the runtime is to work.

    Args:
        precision: Type of its arithmetic.
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # only weights have fewer bits; otherwise there were no law to compare with
    }


def _shapes(spec: StepSpec, nodes: int, shape: Callable[[list[int]], Any]) -> dict[int, Any]:
    """Shapes of all inputs for one row, by their place."""
    inputs = [[1, nodes]] * 2 + [[1, 1, nodes, -1]] * len(spec.kinds)
    inputs += [[1, heads, -1, size] for heads, size in spec.cache_shapes]
    return {index: shape(one) for index, one in enumerate(inputs)}
