"""Offline batches on many machines, by Ray Data."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from monge.core.errors import OptionError
from monge.distributed.batch import Decode, load_decoder
from monge.distributed.ray_cluster import connect, require_ray
from monge.distributed.rows import RowRules, Shard, decode_shard
from monge.options import LoadOptions


def ray_decoding(
    *,
    num_workers: int = 1,
    address: str | None = None,
    num_cpus: float | int = 1,
    num_gpus: float | int = 0,
) -> Decode:
    """Return a function that decodes shards in actors of Ray Data, for `run_batch`.

    A shard whose actor or machine is lost is decoded again elsewhere.

    Args:
        num_workers: Actors, each with a decoder of its own.
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

    def decode(
        shards: Iterable[Shard], load: LoadOptions, rules: RowRules
    ) -> Iterator[tuple[int, Sequence[str]]]:
        ray = require_ray("data")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        is_ours = connect(address)
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            items = [{**shard._asdict(), "lines": list(shard.lines)} for shard in shards]
            workers = min(num_workers, len(items))
            # One block per shard: each is stored as soon as it is done.
            done = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
                ShardActor,
                fn_constructor_args=(load, rules),
                batch_size=1,
                batch_format="pyarrow",  # numpy would cut zeros off the ends of lines
                compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2),
                num_cpus=num_cpus,
                num_gpus=num_gpus or None,
            )
            for row in done.iter_rows():
                yield int(row["number"]), tuple(map(str, row["lines"]))
        finally:
            if is_ours:
                ray.shutdown()

    return decode


class ShardActor:
    """A worker: one decoder, shard after shard."""

    def __init__(self, load: LoadOptions, rules: RowRules) -> None:
        self._decoder, self._rules = load_decoder(load), rules

    def __call__(self, table: Any) -> dict[str, list[Any]]:  # noqa: ANN401 (a table of one row)
        (row,) = table.to_pylist()
        shard = Shard(**row)
        lines = list(decode_shard(self._decoder, shard, self._rules))
        return {"number": [shard.number], "lines": [lines]}
