"""Offline batches on many machines, by Ray Data."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from monge.core.errors import OptionError
from monge.distributed.ray_cluster import connect, require_ray

DecodeBlock = Callable[[int, Sequence[bytes]], Iterable[str]]
"""Returns the output lines of consecutive rows, given the number of the first and their JSON."""


def decode_blocks(
    make: Callable[[], DecodeBlock],
    blocks: Iterable[tuple[int, Sequence[bytes]]],
    *,
    num_workers: int = 1,
    address: str | None = None,
    num_cpus: float | int = 1,
    num_gpus: float | int = 0,
) -> Iterator[str]:
    """Yield the output lines of blocks of rows, in order, which actors of Ray Data decode.

    A block whose actor or machine is lost is decoded again elsewhere.

    Args:
        make: Called by every actor, for what decodes its blocks.
        blocks: The number of the first row, and the rows as JSON.
        num_workers: Actors.
        address: As for `connect`; ignored if this process is connected already.
        num_cpus: Cores of an actor.
        num_gpus: GPUs of an actor.

    Raises:
        OptionError: If a number is out of range.
    """
    if num_workers < 1:
        raise OptionError(f"there must be at least 1 worker; got {num_workers}")
    if num_cpus < 0 or num_gpus < 0:
        raise OptionError(f"a worker cannot have {num_cpus} CPUs and {num_gpus} GPUs")
    ray = require_ray("data")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    is_ours = connect(address)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        items = [{"first": first, "lines": list(lines)} for first, lines in blocks]
        done = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Actor,
            fn_constructor_args=(make,),
            batch_size=1,
            batch_format="pyarrow",  # numpy would cut zeros off the ends of lines
            compute=ray.data.ActorPoolStrategy(
                size=min(num_workers, len(items)), max_tasks_in_flight_per_actor=2
            ),
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
        )
        for row in done.iter_rows():
            yield from map(str, row["lines"])
    finally:
        if is_ours:
            ray.shutdown()


class Actor:
    """A worker: block after block."""

    def __init__(self, make: Callable[[], DecodeBlock]) -> None:
        self._decode = make()

    def __call__(self, table: Any) -> dict[str, list[Any]]:  # noqa: ANN401 (a table of one row)
        (row,) = table.to_pylist()
        return {"lines": [list(self._decode(row["first"], row["lines"]))]}
