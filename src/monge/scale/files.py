"""Batch files: rows in and out, as JSONL or Parquet."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from monge.core.errors import OptionError
from monge.core.extras import require
from monge.scale.rows import ROW_OPTIONS

_JSONL, _PARQUET = ".jsonl", ".parquet"
_ROWS_AT_ONCE: Final = 1024
_MESSAGES: Final = "messages"
_INT64: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class RowFile:
    """The input.

    Args:
        path: A `.jsonl` file with an object a line (empty lines are no rows), or a `.parquet` file.
        prompt_field: Where prompts stand.

    Raises:
        OptionError: If it cannot be read as what its name says.
    """

    path: Path
    prompt_field: str = "prompt"

    def __post_init__(self) -> None:
        check_suffix(self.path, "the input")
        if not self.path.is_file():
            raise OptionError(f"no file {str(self.path)!r}")
        if self.path.suffix == _PARQUET:
            names = _opened(self.path).schema_arrow.names
            if self.prompt_field not in names and _MESSAGES not in names:
                raise OptionError(
                    f"{str(self.path)!r} has no column {self.prompt_field!r}; it "
                    f"has {', '.join(names)}"
                )

    def lines(self) -> Iterator[bytes]:
        """Every row as one line of JSON, malformed ones as they are."""
        return self._of_parquet() if self.path.suffix == _PARQUET else self._of_jsonl()

    def digest(self) -> str:
        """Of the contents: what tells one input from another."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _of_jsonl(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield line.strip()

    def _of_parquet(self) -> Iterator[bytes]:
        file = _opened(self.path)
        wanted = [
            name
            for name in ("id", self.prompt_field, _MESSAGES, *ROW_OPTIONS)
            if name in file.schema_arrow.names
        ]
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
            for record in batch.to_pylist():
                yield json.dumps(record, ensure_ascii=False, default=str).encode()


def check_suffix(path: Path, what: str) -> None:
    """Refuse a file whose format its name does not say.

    Raises:
        OptionError: With the names that are known; or if Parquet cannot be read or written here.
    """
    if path.suffix not in {_JSONL, _PARQUET}:
        raise OptionError(f"{what} must be a {_JSONL} or {_PARQUET} file; got {path.name!r}")
    if path.suffix == _PARQUET:
        _parquet()


def write_rows(lines: Iterable[str], path: Path) -> None:
    """Write output rows in the format that the file's name says.

    Either all of them are there afterwards, or no such file.

    Args:
        lines: JSON, as `BatchRow.as_json` writes it. For Parquet they are gone through twice.
        path: Where to.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    if path.suffix == _PARQUET:
        _write_parquet(lines, unfinished)
    else:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    unfinished.replace(path)


def _write_parquet(lines: Iterable[str], path: Path) -> None:
    parquet = _parquet()
    pyarrow = import_module("pyarrow")
    id_type = _id_type(lines)
    types = {
        "row": pyarrow.int64(),
        "id": pyarrow.int64() if id_type is int else pyarrow.string(),
        "text": pyarrow.string(),
    }
    types |= {
        "token_ids": pyarrow.list_(pyarrow.int64()),
        "finish_reason": pyarrow.string(),
        "seed": pyarrow.int64(),
    }
    types |= {"num_rounds": pyarrow.int64(), "error": pyarrow.string()}
    schema, records = pyarrow.schema(types), list[dict[str, Any]]()
    with parquet.ParquetWriter(path, schema) as writer:
        for line in lines:
            records.append(_for_columns(json.loads(line), id_type))
            if len(records) == _ROWS_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))
                records = []
        writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))


def _id_type(lines: Iterable[str]) -> type | None:
    """`int` or `str` where all ids are, else `None`: a column has one type."""
    kinds = {type(json.loads(line)["id"]) for line in lines} - {type(None)}
    return kinds.pop() if len(kinds) == 1 and kinds <= {int, str} else None


def _for_columns(record: dict[str, Any], id_type: type | None) -> dict[str, Any]:
    if id_type is None and record["id"] is not None:
        record["id"] = json.dumps(record["id"], ensure_ascii=False)
    if record["seed"] is not None and record["seed"] >= _INT64:
        record["seed"] -= 2 * _INT64  # the column is signed; this seed names the same streams
    return record


def _opened(path: Path) -> Any:  # noqa: ANN401 (the host's)
    parquet = _parquet()
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {str(path)!r} as Parquet: {error}") from error


def _parquet() -> ModuleType:
    require("scale", "a Parquet file", "pyarrow")
    return import_module("pyarrow.parquet")
