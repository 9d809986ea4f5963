"""The `monge` command; modules of its commands are imported when they run."""

import atexit
import logging
import os
import sys

from monge.cli.app import app
from monge.runtime.process import bound_spinning

__all__ = ["main"]


def main() -> None:
    """Run the command, then end the process at once: freeing every object of torch takes over a second."""
    bound_spinning()
    statuses: list[int] = []
    atexit.register(
        _leave, statuses
    )  # before all imports of commands, so that it runs after theirs
    try:
        app()
    except SystemExit as end:
        statuses += [end.code] if isinstance(end.code, int) else []
        raise


def _leave(statuses: list[int]) -> None:
    if statuses:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[0])
