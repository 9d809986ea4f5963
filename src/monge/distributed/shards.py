"""Shards: consecutive rows that one worker decodes together and that are stored together."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from monge.distributed.rows import BatchRow, RowRules, read_row
from monge.engine.batch import Batch
from monge.engine.decoder import Decoder

_PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Consecutive rows.

    Args:
        number: Which shard of the file, from 0.
        first_row: Index of the first row.
        lines: The rows, as JSON.
    """

    number: int
    first_row: int
    lines: tuple[bytes, ...]


def shards_of(lines: Iterable[bytes], size: int) -> Iterator[Shard]:
    """Cut rows into shards of `size`."""
    left, number = iter(lines), 0
    while piece := tuple(islice(left, size)):
        yield Shard(number=number, first_row=number * size, lines=piece)
        number += 1


def decode_shard(decoder: Decoder, shard: Shard, rules: RowRules) -> tuple[str, ...]:
    """The output lines of a shard, in order.

    Batches are formed within the shard, so the lines do not depend on the number of workers. A row
    that fails has its error as its line.
    """
    rows = [
        read_row(line, shard.first_row + place, decoder, rules)
        for place, line in enumerate(shard.lines)
    ]
    _decode([row for row in rows if row.session is not None], decoder)
    return tuple(row.as_json() for row in rows)


def _decode(rows: Sequence[BatchRow], decoder: Decoder) -> None:
    row_of = {row.session.context.request_id: row for row in rows if row.session is not None}
    waiting = deque(row.session for row in rows if row.session is not None)
    batch = Batch(decoder.components, prefill_chunk=_PREFILL_CHUNK, isolated=True)
    try:
        while waiting or len(batch):
            free = decoder.max_batch_size - len(batch)
            batch.join([waiting.popleft() for _ in range(min(len(waiting), free))])
            for session in batch.step():
                if session.error is None:
                    row_of[session.context.request_id].num_rounds += 1
    finally:
        batch.close()
