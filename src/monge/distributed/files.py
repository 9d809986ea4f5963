"""Batch files: rows in and out, as JSONL or Parquet."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError
from monge.core.extras import require
from monge.distributed.rows import ROW_OPTIONS

_JSONL, _PARQUET = ".jsonl", ".parquet"
_ROWS_AT_ONCE: Final = 1024
_INT64: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class RowFile:
    """The input.

    Args:
        path: A `.jsonl` file with an object a line (empty lines are no rows), or a `.parquet` file.
        prompt_field: Field or column with the prompt.

    Raises:
        OptionError: If the file does not exist, or has another format than its name says.
    """

    path: Path
    prompt_field: str = "prompt"

    def __post_init__(self) -> None:
        check_suffix(self.path, "the input")
        if not self.path.is_file():
            raise OptionError(f"no file {str(self.path)!r}")
        if self.path.suffix == _PARQUET:
            names = _opened(self.path).schema_arrow.names
            if self.prompt_field not in names and "messages" not in names:
                raise OptionError(
                    f"{str(self.path)!r} has no column {self.prompt_field!r}; it has "
                    f"{', '.join(names)}"
                )

    def lines(self) -> Iterator[bytes]:
        """Return every row as one line of JSON, malformed ones as they are."""
        if self.path.suffix == _PARQUET:
            yield from self._of_parquet()
            return
        with self.path.open("rb") as file:
            yield from (line.strip() for line in file if line.strip())

    def digest(self) -> str:
        """Return the SHA-256 of the contents."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _of_parquet(self) -> Iterator[bytes]:
        file = _opened(self.path)
        known = {"id", "messages", self.prompt_field, *ROW_OPTIONS}
        columns = [name for name in file.schema_arrow.names if name in known]
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            for record in batch.to_pylist():
                yield json.dumps(record, ensure_ascii=False, default=str).encode()


def check_suffix(path: Path, what: str) -> None:
    """Refuse a file of an unknown format.

    Raises:
        OptionError: If the suffix is unknown, or Parquet cannot be read or written here.
    """
    if path.suffix not in {_JSONL, _PARQUET}:
        raise OptionError(f"{what} must be a {_JSONL} or {_PARQUET} file; got {path.name!r}")
    if path.suffix == _PARQUET:
        _parquet()


def write_rows(lines: Iterable[str], path: Path) -> None:
    """Write output rows in the format of the file's suffix, all of them or no file.

    Args:
        lines: JSON, as `decode_shard` writes it. For Parquet they are iterated twice.
        path: The file.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    if path.suffix == _PARQUET:
        _write_parquet(lines, unfinished)
    else:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    unfinished.replace(path)


def _write_parquet(lines: Iterable[str], path: Path) -> None:
    parquet, arrow = _parquet(), import_module("pyarrow")
    kinds = {type(json.loads(line)["id"]) for line in lines} - {type(None)}
    # A column has one type: ids of several kinds are written as JSON.
    are_json = not (kinds <= {int} or kinds <= {str})
    number, text = arrow.int64(), arrow.string()
    columns = {
        "row": number,
        "id": number if kinds == {int} else text,
        "text": text,
        "token_ids": arrow.list_(number),
        "finish_reason": text,
        "seed": number,
        "num_rounds": number,
        "error": text,
    }
    schema, records = arrow.schema(columns), list[dict[str, Any]]()
    with parquet.ParquetWriter(path, schema) as writer:
        for line in lines:
            record = json.loads(line)
            if are_json and record["id"] is not None:
                record["id"] = json.dumps(record["id"], ensure_ascii=False)
            if record["seed"] is not None and record["seed"] >= _INT64:
                record["seed"] -= 2 * _INT64  # signed, it names the same streams
            records.append(record)
            if len(records) == _ROWS_AT_ONCE:
                writer.write_table(arrow.Table.from_pylist(records, schema=schema))
                records.clear()
        writer.write_table(arrow.Table.from_pylist(records, schema=schema))


def _opened(path: Path) -> Any:  # noqa: ANN401 (the host's)
    parquet = _parquet()
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {str(path)!r} as Parquet: {error}") from error


def _parquet() -> Any:  # noqa: ANN401 (the host's)
    require("distributed", "a Parquet file", "pyarrow")
    return import_module("pyarrow.parquet")
