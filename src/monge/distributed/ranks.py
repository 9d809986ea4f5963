"""The processes of one `torchrun`, and messages from rank 0 to the others."""

import os
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from monge.core.errors import OptionError

_PATIENCE: Final = timedelta(days=365)
"""Timeout for the next call: a server may be idle, and torchrun notices a dead rank."""


class Ranks:
    """All processes of a run.

    Raises:
        OptionError: If this process was not started by torchrun, or alone.
    """

    def __init__(self) -> None:
        missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
        if missing or int(os.environ["WORLD_SIZE"]) < 2:
            raise OptionError(
                "tensor parallelism needs several processes, which torchrun starts: "
                "torchrun --nproc-per-node 2 -m monge generate ... --tensor-parallel"
            )
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._group: Any = None

    def join(self) -> None:
        """Join the other ranks; the host creates the process group while it loads."""
        # Calls are Python objects, so they use gloo, whatever the tensors use.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def broadcast(self, message: object) -> None:
        """Send an object to all others; for rank 0."""
        dist.broadcast_object_list([message], src=0, group=self._group)

    def receive(self) -> Any:  # noqa: ANN401
        """Receive the next object from rank 0."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]
