"""Offline batches: rows of a file in, their completions out."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from monge.api import load
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.distributed.files import RowFile, check_suffix, write_rows
from monge.distributed.journal import open_journal
from monge.distributed.rows import RowRules, Shard, decode_shard
from monge.engine.decoder import Decoder
from monge.options import LoadOptions, changed

Decode = Callable[[Iterable[Shard], LoadOptions, RowRules], Iterator[tuple[int, Sequence[str]]]]
"""Decodes shards with a decoder of these options: yields the numbers and the output lines of finished
shards, in any order."""

_PLAIN = (str, int, float, bool, type(None))


def load_decoder(options: LoadOptions) -> Decoder:
    """Load the decoder in this process."""
    return load(**changed(options))


def plain(options: LoadOptions) -> dict[str, Any]:
    """Return the options that are not defaults, to be written down and sent to other processes.

    Raises:
        OptionError: If one is an object, which means nothing to another process.
    """
    given = changed(options)
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, _PLAIN) for item in values):
            raise OptionError(
                f"{name} must be written as text or a number, since other processes read it; got "
                "an object"
            )
    return given


def decode_here(
    shards: Iterable[Shard], load: LoadOptions, rules: RowRules
) -> Iterator[tuple[int, Sequence[str]]]:
    """Decode shards one after the other, in this process."""
    decoder = load_decoder(load)
    for shard in shards:
        yield shard.number, decode_shard(decoder, shard, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch file to complete.

    Args:
        source: The rows.
        output: The `.jsonl` or `.parquet` file to write.
        load: Options of the decoder, as text and numbers.
        options: Options of `Decoder.requests` for rows that do not set them. A seed makes the run
            reproducible; without, each row draws one.
        shard_rows: Rows that are decoded and stored together. The output may depend on it, since
            the floating-point sums of a row depend on its neighbours.
        overwrite: Replace an existing output.
        restart: Discard an unfinished run instead of continuing it.

    Raises:
        OptionError: If an option is invalid, whatever the rows are.
    """

    source: RowFile
    output: Path
    load: LoadOptions = LoadOptions()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shard_rows: int = 128
    overwrite: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        check_suffix(self.output, "the output")
        if self.shard_rows < 1:
            raise OptionError(f"a shard must hold at least 1 row; got {self.shard_rows}")
        self.rules.check()
        _ = plain(self.load)
        if self.output.is_dir():
            raise OptionError(
                f"{str(self.output)!r} is a directory; give the output the name of a file"
            )
        if self.output.exists() and self.output.samefile(self.source.path):
            raise OptionError("input and output are the same file; give the output another name")

    @property
    def rules(self) -> RowRules:
        """Rules for reading rows."""
        return RowRules(options=self.options, prompt_field=self.source.prompt_field)

    def settings(self) -> dict[str, Any]:
        """Return everything that the output depends on."""
        return {
            "input": self.source.digest(),
            "prompt_field": self.source.prompt_field,
            "decoder": plain(self.load),
            "options": {name: self.options[name] for name in self.options if name != "seed"},
            "shard_rows": self.shard_rows,
            "seed": self.options.get("seed"),
        }

    def shards(self) -> Iterator[Shard]:
        """Return the rows in shards."""
        lines, first = self.source.lines(), 0
        while part := tuple(islice(lines, self.shard_rows)):
            yield Shard(first // self.shard_rows, first, part)
            first += len(part)

    def check_output(self) -> None:
        """Refuse to replace an output.

        Raises:
            OptionError: If it exists, and `overwrite` is off.
        """
        if self.output.exists() and not self.overwrite:
            raise OptionError(
                f"{str(self.output)!r} is there already; give another name, or replace it with "
                "--overwrite"
            )


def run_batch(
    job: BatchJob, decode: Decode, on_progress: Callable[[int, int], None]
) -> tuple[int, int]:
    """Decode the rows that are not decoded yet, and write the output once all of them are.

    Args:
        job: The batch.
        decode: Decodes its shards: `decode_here`, or `ray_data.ray_decoding`.
        on_progress: Called with the numbers of finished and of all rows, first before anything is
            decoded.

    Returns:
        The number of rows, and how many of them have an error in place of a text.

    Raises:
        OptionError: If the output is there already, an unfinished run had other settings, or not a
            single row could be decoded.
    """
    job.check_output()
    sizes = {shard.number: len(shard.lines) for shard in job.shards()}
    num_rows = sum(sizes.values())
    if num_rows == 0:
        raise OptionError(f"{str(job.source.path)!r} holds no rows")
    with open_journal(job.output, job.settings(), restart=job.restart) as journal:
        finished = journal.finished
        done = sum(sizes[number] for number in finished)
        on_progress(done, num_rows)
        if done < num_rows:
            pending = (shard for shard in job.shards() if shard.number not in finished)
            for number, lines in decode(pending, job.load, job.rules):
                journal.put(number, lines)
                done += len(lines)
                on_progress(done, num_rows)
        if journal.num_errors == num_rows:
            first = next(iter(journal))
            journal.discard()  # it would bind the next, corrected command
            raise OptionError(
                f"none of {counted(num_rows, 'row')} could be decoded, so nothing was written; "
                f"the first one: {json.loads(first)['error']}"
            )
        job.check_output()
        write_rows(journal, job.output)
        journal.discard()
        return num_rows, journal.num_errors
