"""Offline batches: rows of a file in, their completions out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from monge.core.errors import OptionError
from monge.core.words import counted
from monge.scale.files import RowFile, check_suffix
from monge.scale.rows import RowRules, check_options
from monge.scale.shards import Shard, decode_shard, shards_of
from monge.scale.spec import DecoderSpec
from monge.scale.store import shard_store

Finished = tuple[int, tuple[str, ...]]
"""A shard's number and its output lines."""


@runtime_checkable
class Workers(Protocol):
    """Who decodes shards."""

    def decode(
        self, shards: Iterable[Shard], spec: DecoderSpec, rules: RowRules
    ) -> Iterator[Finished]:
        """Finished shards, in any order.

        Args:
            shards: What is to be done.
            spec: What decodes.
            rules: How rows are read.
        """
        ...


@dataclass(frozen=True, slots=True)
class ThisProcess:
    """Decodes shards one after the other, here."""

    def decode(
        self, shards: Iterable[Shard], spec: DecoderSpec, rules: RowRules
    ) -> Iterator[Finished]:
        decoder = spec.load()
        for shard in shards:
            yield shard.number, decode_shard(decoder, shard, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What is to be done.

    Args:
        source: The rows.
        output: The `.jsonl` or `.parquet` file to write.
        spec: What decodes.
        options: Options of `Decoder.requests`, for rows that say nothing else.
        seed: The run's seed, which gives the texts again; without, each row has one that is drawn.
        shard_rows: Rows that are decoded together and kept together. The output may depend on it,
            since the floating-point sums of a row depend on its neighbours.
        overwrite: Whether an output that is there is replaced.
        restart: Whether an unfinished run is thrown away instead of gone on with.
    """

    source: RowFile
    output: Path
    spec: DecoderSpec = DecoderSpec()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    shard_rows: int = 128
    overwrite: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        check_suffix(self.output, "the output")
        if self.shard_rows < 1:
            raise OptionError(f"a shard must hold at least 1 row; got {self.shard_rows}")
        check_options(self.options, self.seed)
        if self.output.is_dir():
            raise OptionError(
                f"{str(self.output)!r} is a directory; give the output the name of a file"
            )
        if self.output.exists() and self.output.samefile(self.source.path):
            raise OptionError("input and output are the same file; give the output another name")

    def settings(self) -> dict[str, Any]:
        """All that the output depends on."""
        return {
            "input": self.source.digest(),
            "prompt_field": self.source.prompt_field,
            "decoder": self.spec.as_dict(),
            "options": dict(self.options),
            "shard_rows": self.shard_rows,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What was done.

    Args:
        num_rows: Rows of the input, and of the output.
        num_errors: Rows that have an error in place of a text.
    """

    num_rows: int
    num_errors: int


def run_batch(
    job: BatchJob, workers: Workers, on_progress: Callable[[int, int], None]
) -> BatchReport:
    """Decode all rows that are not decoded yet, and write the output once all of them are.

    Args:
        job: What is to be done.
        workers: Who does it.
        on_progress: Told how many rows are done and how many there are; first before anything is
            decoded.

    Raises:
        OptionError: If the output is there already, an unfinished run had other settings, or not a
            single row could be decoded.
    """
    _check_output(job)
    num_rows = _num_rows(job.source)
    rows = [
        range(first, min(first + job.shard_rows, num_rows))
        for first in range(0, num_rows, job.shard_rows)
    ]
    with shard_store(job.output, job.settings(), rows, restart=job.restart) as store:
        rules = RowRules(seed=job.seed, options=job.options, prompt_field=job.source.prompt_field)
        finished = store.finished
        done = sum(len(rows[number]) for number in finished)
        on_progress(done, num_rows)
        if done < num_rows:
            pending = (
                shard
                for shard in shards_of(job.source.lines(), job.shard_rows)
                if shard.number not in finished
            )
            for number, lines in workers.decode(pending, job.spec, rules):
                store.put(number, lines)
                done += len(lines)
                on_progress(done, num_rows)
        if store.num_errors == num_rows:
            error = store.first_error()
            store.discard()  # or it would stand in the way of the command that is right
            raise OptionError(
                f"none of {counted(num_rows, 'row')} could be decoded, so nothing was written; "
                f"the first one: {error}"
            )
        _check_output(job)
        store.merge()
        return BatchReport(num_rows=num_rows, num_errors=store.num_errors)


def _check_output(job: BatchJob) -> None:
    if job.output.exists() and not job.overwrite:
        raise OptionError(
            f"{str(job.output)!r} is there already; give another name, or replace "
            "it with --overwrite"
        )


def _num_rows(source: RowFile) -> int:
    num_rows = sum(1 for _ in source.lines())
    if num_rows == 0:
        raise OptionError(f"{str(source.path)!r} holds no rows")
    return num_rows
