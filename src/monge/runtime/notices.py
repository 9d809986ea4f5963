"""Saying what takes long."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

_LOG: Final = logging.getLogger("monge")
Watcher = Callable[[str, float | int | None], AbstractContextManager[object]]
"""Takes a name and the expected seconds; shows both until the context manager exits."""
_watchers: Final[list[Watcher]] = []


def notify(text: str) -> None:
    """Log a message. If no log handler is configured, write it to the terminal, if any."""
    _LOG.info(text)
    if not _LOG.hasHandlers() and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def waiting(name: str, expected_s: float | int | None = None) -> AbstractContextManager[object]:
    """Show the name of a slow block and its remaining time, if a watcher is set."""
    return _watchers[-1](name, expected_s) if _watchers else nullcontext()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Set the watcher of `waiting` inside this block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
