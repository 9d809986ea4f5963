"""Stores finished shards, so that an interrupted run can continue."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from monge.core.errors import OptionError
from monge.distributed.files import write_rows

_SHARDS: Final = "[0-9]*.jsonl"
_LOG: Final = logging.getLogger(__name__)


@contextmanager
def shard_store(
    output: Path, settings: Mapping[str, Any], rows: Sequence[range], *, restart: bool = False
) -> Iterator["ShardStore"]:
    """A folder `OUT.parts` beside the output.

    While it is open, no other process can work on the same output.

    Args:
        output: The file that is to be written at the end.
        settings: Plain values that determine the output. They bind later runs once a shard is
            stored.
        rows: The rows of every shard.
        restart: Whether an unfinished run is thrown away instead of gone on with.

    Raises:
        OptionError: If an unfinished run had other settings, or another process works on it.
    """
    folder = _parts_of(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise OptionError(f"cannot write beside {str(output)!r}: {error}") from error
    with lock:
        if not _is_locked(lock):
            raise OptionError(f"another process is writing {str(output)!r}")
        if restart:
            for path in (*folder.glob(_SHARDS), *folder.glob("settings.json")):
                path.unlink()
        try:
            yield ShardStore(output, rows, _agreed(folder, settings))
        finally:
            _leave_nothing_empty(folder)


class ShardStore:
    """Finished shards, a file each, which is there as a whole or not at all.

    Args:
        output: The file that is to be written at the end.
        rows: The rows of every shard.
        settings: What is kept with the shards.
    """

    def __init__(self, output: Path, rows: Sequence[range], settings: Mapping[str, Any]) -> None:
        self._output, self._folder, self._rows, self._settings = (
            output,
            _parts_of(output),
            rows,
            settings,
        )
        self._num_errors = {
            number: count
            for number in range(len(rows))
            if (count := self._errors_in(number)) is not None
        }

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the shards that are there."""
        return frozenset(self._num_errors)

    @property
    def num_errors(self) -> int:
        """Rows with an error, of the shards that are there."""
        return sum(self._num_errors.values())

    def put(self, number: int, lines: Sequence[str]) -> None:
        """Keep a finished shard."""
        if not self._num_errors:
            write_rows([json.dumps(self._settings)], self._folder / "settings.json")
        write_rows(lines, self._path(number))
        self._num_errors[number] = _errors_of(lines)

    def first_error(self) -> str | None:
        """What the first row with an error says."""
        errors = (json.loads(line)["error"] for line in _Lines(self._paths()))
        return next((error for error in errors if error is not None), None)

    def merge(self) -> None:
        """Write the output and remove the folder.

        Raises:
            OptionError: If a shard is not what was put there; nothing is written then.
        """
        damaged = [number for number in range(len(self._rows)) if self._errors_in(number) is None]
        if damaged:
            raise OptionError(
                f"{str(self._path(damaged[0]))!r} was changed while others were "
                "decoded; give the command again"
            )
        write_rows(_Lines(self._paths()), self._output)
        self.discard()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"

    def _paths(self) -> list[Path]:
        return [self._path(number) for number in range(len(self._rows))]

    def _errors_in(self, number: int) -> int | None:
        """Rows with an error in a shard's file.

        `None` where it is missing, or is not what a run writes.
        """
        path = self._path(number)
        if not path.exists():
            return None
        try:
            lines = list(_Lines([path]))
            if [json.loads(line)["row"] for line in lines] == list(self._rows[number]):
                return _errors_of(lines)
        # Unreadable, cut off, or something else altogether.
        except (OSError, ValueError, KeyError, TypeError):
            pass
        _LOG.warning("%s is damaged: its %d rows are decoded again", path, len(self._rows[number]))
        return None


class _Lines(Iterable[str]):
    """The lines of several files, one after the other, as often as they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line.rstrip("\n")


def _parts_of(output: Path) -> Path:
    """Where the shards of an unfinished output are kept."""
    return output.with_name(f"{output.name}.parts")


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    # Whoever held it may have removed the folder meanwhile, and a third one made it anew.
    return os.fstat(lock.fileno()).st_nlink > 0


def _leave_nothing_empty(folder: Path) -> None:
    """Remove a folder without shards: a start that failed has begun nothing."""
    if not any(folder.glob(_SHARDS)):
        for name in ("lock", "settings.json"):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is gone, or holds what is not ours
            folder.rmdir()


def _errors_of(lines: Iterable[str]) -> int:
    return sum(json.loads(line)["error"] is not None for line in lines)


def _agreed(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, after they were compared with those of the unfinished run, if there is one."""
    ours: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    if not any(folder.glob(_SHARDS)):
        return ours
    before = _settings_in(folder)
    differing = [
        name for name in sorted(before.keys() | ours.keys()) if before.get(name) != ours.get(name)
    ]
    if differing:
        name = differing[0]
        raise OptionError(
            f"{str(folder)!r} holds an unfinished run with other settings: {name} was "
            f"{before.get(name)!r} and is "
            f"{ours.get(name)!r}; go on with the same, or throw it away with --restart"
        )
    return ours


def _settings_in(folder: Path) -> dict[str, Any]:
    try:
        before: Any = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or "seed" not in before:
        raise OptionError(
            f"{str(folder)!r} holds an unfinished run whose settings.json is missing or damaged, "
            "so nobody knows what it was; "
            "throw it away with --restart"
        )
    return before
