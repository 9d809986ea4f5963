"""The processes of one `torchrun`, and rank 0's way to tell the others what to do."""

import os
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from monge.core.errors import OptionError

_PATIENCE: Final = timedelta(days=365)
"""How long a rank waits for the next call: a server may be idle, and a rank that dies is noticed by torchrun."""


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
        """Meet the others; once the process group exists, which the host makes while it loads."""
        # Calls are Python objects: they go by gloo, whatever the tensors go by.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def tell(self, message: object) -> None:
        """Send an object to all others; for rank 0."""
        dist.broadcast_object_list([message], src=0, group=self._group)

    def hear(self) -> Any:  # noqa: ANN401
        """The next object that rank 0 sends."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=0, group=self._group)
        return heard[0]
