"""What this library keeps on disk: compiled programs, and GGUF files in the form in which they are loaded."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from monge.backends.cpu.program_cache import MODELS, PROGRAMS, cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One thing in the cache.

    Attributes:
        path: A folder.
        what: What it holds, in words.
        num_bytes: Its size on disk.
        days: Days since it was last read or written.
    """

    path: Path
    what: str
    num_bytes: int
    days: float


def kept() -> list[Kept]:
    """Return what the cache holds, the largest first; nothing else in its folder is looked at."""
    folder = cache_folder()
    found = [(path, _words(path.name)) for path in _folders(folder / MODELS)]
    if (programs := folder / PROGRAMS).is_dir():
        count = sum(path.suffix == ".constants" for path in programs.iterdir())
        found.append((programs, f"{count} compiled program{'s'[: count != 1]}"))
    rows = [_row(path, what) for path, what in found]
    return sorted(rows, key=lambda one: -one.num_bytes)


def clear(rows: list[Kept]) -> None:
    """Delete these folders. What a running process has mapped stays readable for it.

    Raises:
        OSError: If one cannot be deleted.
    """
    for one in rows:
        shutil.rmtree(one.path)


def _row(path: Path, what: str) -> Kept:
    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    last = max((max(one.st_atime, one.st_mtime) for one in stats), default=time.time())
    size, days = sum(one.st_size for one in stats), max(0.0, time.time() - last) / 86400
    return Kept(path=path, what=what, num_bytes=size, days=days)


def _folders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []


def _words(name: str) -> str:
    if name.startswith("."):
        return "a GGUF file, unfinished"
    stem, _, _ = name.rpartition("-")
    stem, mark, kind = stem.rpartition("-file")
    if mark and kind.isdigit():
        return f"{stem}.gguf in its own types"
    return f"{name.rpartition('-')[0]}.gguf, dequantised"
