"""Saying what takes long."""

import logging
import sys
from typing import Final

_LOG: Final = logging.getLogger("monge")


def notify(text: str) -> None:
    """Log a sentence; where nobody handles the log, as in a notebook or a script, write it to a terminal."""
    _LOG.info(text)
    if not _LOG.hasHandlers() and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
