"""Where finished shards wait for the others: what makes a killed run go on."""

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monge.core.errors import OptionError
from monge.scale.files import write_rows


@contextmanager
def shard_store(output: Path, settings: Mapping[str, Any], *, drawn_seed: int, restart: bool = False) -> Iterator["ShardStore"]:
    """A folder `OUT.parts` beside the output; while it is open, no other process can work on the same output.

    Args:
        output: The file that is to be written at the end.
        settings: All that the output depends on, plain values. A `seed` of `None` is that of the run that is gone on with, or
            `drawn_seed` for a new one.
        drawn_seed: See there.
        restart: Whether an unfinished run is thrown away instead of gone on with.

    Raises:
        OptionError: If an unfinished run had other settings, or another process works on it.
    """
    folder = parts_of(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise OptionError(f"cannot write beside {str(output)!r}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(f"another process is writing {str(output)!r}") from error
        if restart:
            for path in (*folder.glob("*.jsonl"), *folder.glob("settings.json")):
                path.unlink()
        yield ShardStore(output, _agreed(folder, settings, drawn_seed))


def parts_of(output: Path) -> Path:
    """Where the shards of an unfinished output are kept."""
    return output.with_name(f"{output.name}.parts")


class ShardStore:
    """Finished shards, a file each, which is there as a whole or not at all.

    Args:
        output: The file that is to be written at the end.
        seed: The run's seed.
    """

    def __init__(self, output: Path, seed: int) -> None:
        self._output, self._folder, self.seed = output, parts_of(output), seed

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the shards that are there."""
        return frozenset(int(path.stem) for path in self._folder.glob("*.jsonl"))

    def put(self, number: int, lines: Sequence[str]) -> None:
        """Keep a finished shard."""
        write_rows(lines, self._path(number))

    def merge(self, num_shards: int) -> int:
        """Write the output and remove the folder.

        Returns:
            The number of rows with an error.
        """
        every = _Lines([self._path(number) for number in range(num_shards)])
        write_rows(every, self._output)
        num_errors = sum(json.loads(line)["error"] is not None for line in every)
        shutil.rmtree(self._folder)
        return num_errors

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"


class _Lines(Iterable[str]):
    """The lines of several files, one after the other, as often as they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line.rstrip("\n")


def _agreed(folder: Path, settings: Mapping[str, Any], drawn_seed: int) -> int:
    """The run's seed, after its settings were compared with those of the unfinished one, if there is one."""
    path = folder / "settings.json"
    before: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    ours: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    if ours["seed"] is None:
        ours["seed"] = drawn_seed if before is None else before["seed"]
    if before is None:
        write_rows([json.dumps(ours)], path)
        return ours["seed"]
    differing = [name for name in sorted(before.keys() | ours.keys()) if before.get(name) != ours.get(name)]
    if differing:
        name = differing[0]
        raise OptionError(
            f"{str(folder)!r} holds an unfinished run with other settings: {name} was {before.get(name)!r} and is "
            f"{ours.get(name)!r}; go on with the same, or throw it away with --restart"
        )
    return ours["seed"]
