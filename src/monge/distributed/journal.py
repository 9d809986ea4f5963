"""The journal of a batch: its finished shards, so that an interrupted run can continue."""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from monge.core.errors import OptionError
from monge.distributed.files import write_rows

_LOG: Final = logging.getLogger(__name__)


@contextmanager
def open_journal(
    output: Path, settings: Mapping[str, Any], rows: Sequence[range], *, restart: bool = False
) -> Iterator["Journal"]:
    """Open the file `OUT.parts` beside an output.

    While it is open, no other process can write the same output.

    Args:
        output: The file that is to be written at the end.
        settings: Plain values that determine the output. They bind later runs once a shard is
            stored.
        rows: The rows of every shard.
        restart: Throw an unfinished run away instead of going on with it.

    Raises:
        OptionError: If an unfinished run had other settings, or another process works on it.
    """
    path = output.with_name(f"{output.name}.parts")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise OptionError(f"cannot write beside {str(output)!r}: {error}") from error
    with file:
        if not _is_locked(file):
            raise OptionError(f"another process is writing {str(output)!r}")
        if restart:
            file.truncate(0)
        journal = Journal(file, path, rows, settings)
        try:
            yield journal
        finally:
            if not journal.finished:  # a start that failed has begun nothing
                path.unlink(missing_ok=True)


class Journal(Iterable[str]):
    """Finished shards, a line each, after a line with the settings; iterates over the output lines.

    A line that is damaged or cut off counts as not written.

    Args:
        file: The open file.
        path: Its path.
        rows: The rows of every shard.
        settings: Plain values that determine the output.

    Raises:
        OptionError: If the file holds shards of other or unknown settings.
    """

    def __init__(
        self, file: IO[bytes], path: Path, rows: Sequence[range], settings: Mapping[str, Any]
    ) -> None:
        self._file, self._path, self._rows = file, path, rows
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self._places: dict[int, int] = {}
        self._num_errors: dict[int, int] = {}
        self._read()

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the stored shards."""
        return frozenset(self._places)

    @property
    def num_errors(self) -> int:
        """Stored rows with an error."""
        return sum(self._num_errors.values())

    def put(self, number: int, lines: Sequence[str]) -> None:
        """Store a finished shard."""
        if not self._places:
            self._file.truncate(0)
            self._file.write(json.dumps(self._settings).encode() + b"\n")
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps([number, *lines]).encode() + b"\n")
        self._file.flush()
        self._keep(number, lines, place)

    def first_error(self) -> str | None:
        """Return the error of the first row that has one."""
        errors = (json.loads(line)["error"] for line in self)
        return next((error for error in errors if error is not None), None)

    def merge(self, output: Path) -> None:
        """Write the output and remove the journal."""
        write_rows(self, output)
        self.discard()

    def discard(self) -> None:
        """Remove the journal."""
        self._path.unlink()

    def __iter__(self) -> Iterator[str]:
        for number in sorted(self._places):
            self._file.seek(self._places[number])
            yield from json.loads(self._file.readline())[1:]

    def _read(self) -> None:
        self._file.seek(0)
        head = line = self._file.readline()
        place = self._file.tell()
        while following := self._file.readline():
            line = following
            if shard := self._shard_in(line):
                self._keep(*shard, place)
            elif line.strip():
                _LOG.warning("%s has a damaged line: its rows are decoded again", self._path)
            place = self._file.tell()
        if self._places:
            self._check_settings(head)
        if line and not line.endswith(b"\n"):
            self._file.write(b"\n")

    def _shard_in(self, line: bytes) -> tuple[int, list[str]] | None:
        try:
            number, *lines = json.loads(line)
            if [json.loads(one)["row"] for one in lines] == list(self._rows[number]):
                _ = _errors_of(lines)
                return number, lines
        # Unreadable, cut off, or something else altogether.
        except (ValueError, LookupError, TypeError):
            pass
        return None

    def _keep(self, number: int, lines: Sequence[str], place: int) -> None:
        self._places[number], self._num_errors[number] = place, _errors_of(lines)

    def _check_settings(self, head: bytes) -> None:
        try:
            before: Any = json.loads(head)
        except ValueError:
            before = None
        if not isinstance(before, dict) or "seed" not in before:
            raise OptionError(
                f"{str(self._path)!r} holds an unfinished run whose settings are damaged, so nobody "
                "knows what it was; throw it away with --restart"
            )
        ours = self._settings
        for name in sorted(before.keys() | ours.keys()):
            if before.get(name) != ours.get(name):
                raise OptionError(
                    f"{str(self._path)!r} holds an unfinished run with other settings: {name} was "
                    f"{before.get(name)!r} and is {ours.get(name)!r}; go on with the same, or throw "
                    "it away with --restart"
                )


def _is_locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # Whoever held it may have removed the file meanwhile, and a third one made it anew.
    return os.fstat(file.fileno()).st_nlink > 0


def _errors_of(lines: Iterable[str]) -> int:
    return sum(json.loads(line)["error"] is not None for line in lines)
