"""Saying what takes long."""

import logging
import sys
from typing import Final

_LOG: Final = logging.getLogger("monge")


def notify(text: str) -> None:
    """Log a message; if no log handler is configured, write it to the terminal, if there is one."""
    _LOG.info(text)
    if not _LOG.hasHandlers() and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
