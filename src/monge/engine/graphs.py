"""CUDA graphs: work that is launched once and repeated as a whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from monge.core.errors import BackendError

Outputs = tuple[Tensor, ...]


class GraphRecorder:
    """Records work as CUDA graphs, which share the memory of what lies between their inputs and outputs; a `Recorder`.

    Args:
        device: Where the work is done.

    Raises:
        BackendError: If it is no CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendError(f"steps on {device} are neither compiled nor recorded: that is done on CPUs and CUDA devices")
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        with torch.cuda.device(self._device):
            # Libraries set themselves up when they are first used, which cannot be recorded.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device: a server decodes in one and answers in others.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = work()
        return graph.replay, outputs
