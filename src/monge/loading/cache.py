"""What this library keeps on disk: compiled programs, and GGUF files in the form in which they are loaded."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from monge.backends.cpu.code_cache import MODELS, PROGRAMS, cache_folder
from monge.core.words import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An entry of the cache.

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
    programs = cache_folder() / PROGRAMS
    files = [path for path in (cache_folder() / MODELS).glob("*") if path.is_dir()]
    rows = [_row(path, _words(path.name)) for path in sorted(files)]
    if programs.is_dir():
        count = sum(path.suffix == ".constants" for path in programs.iterdir())
        rows.append(_row(programs, counted(count, "compiled program")))
    return sorted(rows, key=lambda row: -row.num_bytes)


def _row(path: Path, what: str) -> Kept:
    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    last = max((max(stat.st_atime, stat.st_mtime) for stat in stats), default=time.time())
    size, days = sum(stat.st_size for stat in stats), max(0.0, time.time() - last) / 86400
    return Kept(path=path, what=what, num_bytes=size, days=days)


def _words(name: str) -> str:
    if name.startswith("."):
        return "a GGUF file, unfinished"
    stem = name.rpartition("-")[0]
    packed = re.fullmatch(r"(.*)-file\d+", stem)
    return f"{packed[1]}.gguf in its own types" if packed else f"{stem}.gguf, dequantised"
