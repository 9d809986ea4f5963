"""The journal of a batch: its finished shards, so that an interrupted run can continue."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from monge.core.errors import OptionError


@contextmanager
def open_journal(
    output: Path, settings: Mapping[str, Any], *, restart: bool = False
) -> Iterator["Journal"]:
    """Open the file `OUT.parts` beside an output, which locks the output for other processes.

    A journal without a shard is removed at the end.

    Args:
        output: The file to write.
        settings: Plain values that determine the output.
        restart: Discard an unfinished run instead of continuing it.

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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file before it released the lock.
            is_taken = os.fstat(file.fileno()).st_nlink == 0
        except OSError:
            is_taken = True
        if is_taken:
            raise OptionError(f"another process is writing {str(output)!r}")
        if restart:
            file.truncate(0)
        journal = Journal(file, settings)
        try:
            yield journal
        finally:
            if not journal.finished:
                path.unlink(missing_ok=True)


class Journal:
    """Finished shards, one line each, after a line with the settings; iterates over output lines.

    The file ends before the first damaged line: its shard and later ones are decoded again.

    Args:
        file: The open file.
        settings: Plain values that determine the output.

    Raises:
        OptionError: If the file holds shards of other settings.
    """

    def __init__(self, file: IO[bytes], settings: Mapping[str, Any]) -> None:
        self._file = file
        self._settings: dict[str, Any] = json.loads(json.dumps(settings, default=asdict))
        self._places: dict[int, int] = {}
        self.num_errors = 0
        file.seek(0)
        head = file.readline()
        end = file.tell()
        while shard := _shard_in(line := file.readline()):
            self._add(*shard, end)
            end += len(line)
        if self._places:
            self._check_settings(head)
            file.truncate(end)

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the stored shards."""
        return frozenset(self._places)

    def put(self, number: int, lines: Sequence[str]) -> None:
        """Store the output lines of a finished shard."""
        if not self._places:
            self._file.truncate(0)
            self._file.write(json.dumps(self._settings).encode() + b"\n")
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps([number, *lines]).encode() + b"\n")
        self._file.flush()
        self._add(number, lines, place)

    def discard(self) -> None:
        """Forget all shards."""
        self._places.clear()

    def __iter__(self) -> Iterator[str]:
        for number in sorted(self._places):
            self._file.seek(self._places[number])
            yield from json.loads(self._file.readline())[1:]

    def _add(self, number: int, lines: Sequence[str], place: int) -> None:
        self._places[number] = place
        self.num_errors += sum(json.loads(line)["error"] is not None for line in lines)

    def _check_settings(self, head: bytes) -> None:
        before: Any = None
        with suppress(ValueError):
            before = json.loads(head)
        path = self._file.name
        if not isinstance(before, dict) or "seed" not in before:
            raise OptionError(
                f"{path!r} holds an unfinished run whose settings are damaged; discard it with "
                "--restart"
            )
        for name in sorted(before.keys() | self._settings.keys()):
            was, is_now = before.get(name), self._settings.get(name)
            if was != is_now:
                raise OptionError(
                    f"{path!r} holds an unfinished run with other settings: {name} was {was!r} and "
                    f"is {is_now!r}; continue with the same, or discard it with --restart"
                )


def _shard_in(line: bytes) -> tuple[int, list[str]] | None:
    """Return the number and the output lines of a shard, or `None` for a damaged line."""
    if not line.endswith(b"\n"):
        return None
    try:
        number, *lines = json.loads(line)
        _ = [json.loads(text)["error"] for text in lines]
    except (ValueError, LookupError, TypeError):
        return None
    return (number, lines) if lines else None
