"""Saying what takes long."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

_LOG: Final = logging.getLogger("monge")
Watcher = Callable[[str, float | int | None], AbstractContextManager[None]]
"""Shows a name and the expected seconds while the block of its context manager runs."""
_watchers: Final[list[Watcher]] = []


def notify(text: str) -> None:
    """Log a message; if no log handler is configured, write it to the terminal, if there is one."""
    _LOG.info(text)
    if not _LOG.hasHandlers() and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def waiting(name: str, expected_s: float | int | None = None) -> AbstractContextManager[None]:
    """A block that takes long: whoever watches shows its name and the time that is left."""
    return _watchers[-1](name, expected_s) if _watchers else nullcontext()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let a watcher show the blocks of `waiting` that run in this one."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
