"""Offline batches on many machines, by Ray Data."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from monge.core.errors import OptionError
from monge.distributed.batch import Finished
from monge.distributed.ray_cluster import connect, require_ray
from monge.distributed.rows import RowRules
from monge.distributed.shards import Shard, decode_shard
from monge.distributed.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Decodes shards in actors of Ray Data.

    A shard whose actor or machine is lost is decoded again elsewhere.

    Args:
        num_workers: Actors, each with a decoder of its own.
        address: As for `connect`; without meaning where this process is connected already.
        num_cpus: Cores of an actor.
        num_gpus: GPUs of an actor.

    Raises:
        OptionError: If a number cannot be.
    """

    num_workers: int = 1
    address: str | None = None
    num_cpus: float | int = 1
    num_gpus: float | int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise OptionError(f"there must be at least 1 worker; got {self.num_workers}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise OptionError(f"a worker cannot have {self.num_cpus} CPUs and {self.num_gpus} GPUs")

    def decode(
        self, shards: Iterable[Shard], spec: DecoderSpec, rules: RowRules
    ) -> Iterator[Finished]:
        ray = require_ray("data")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        is_ours = connect(self.address)
        try:
            yield from self._decode(ray.data, list(shards), spec, rules)
        finally:
            if is_ours:
                ray.shutdown()

    def _decode(
        self,
        data: Any,  # noqa: ANN401
        shards: list[Shard],
        spec: DecoderSpec,
        rules: RowRules,
    ) -> Iterator[Finished]:
        data.DataContext.get_current().enable_progress_bars = False
        items = [
            {"number": shard.number, "first_row": shard.first_row, "lines": list(shard.lines)}
            for shard in shards
        ]
        # A block a shard, so that an actor gets one at a time and each is kept as soon as it is
        # done.
        done = data.from_items(items, override_num_blocks=len(items)).map_batches(
            ShardActor,
            fn_constructor_args=(spec, rules),
            batch_size=1,
            batch_format="pyarrow",  # numpy would cut zeros off the ends of lines
            compute=data.ActorPoolStrategy(
                size=min(self.num_workers, len(items)), max_tasks_in_flight_per_actor=2
            ),
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus or None,
        )
        for row in done.iter_rows():
            yield int(row["number"]), tuple(str(line) for line in row["lines"])


class ShardActor:
    """An actor's part: one decoder, shard after shard.

    Args:
        spec: What decodes.
        rules: How rows are read.
    """

    def __init__(self, spec: DecoderSpec, rules: RowRules) -> None:
        self._decoder, self._rules = spec.load(), rules

    def __call__(self, given: Any) -> dict[str, list[Any]]:  # noqa: ANN401 (a table of one row)
        """Decode the shard of a batch of one."""
        (row,) = given.to_pylist()
        shard = Shard(number=row["number"], first_row=row["first_row"], lines=tuple(row["lines"]))
        return {
            "number": [shard.number],
            "lines": [list(decode_shard(self._decoder, shard, self._rules))],
        }
