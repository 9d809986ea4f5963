"""The built-in pair behind `monge serve`, in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@contextmanager
def served(
    *options: str, port: int = 0, descriptors: int | None = None, shutdown_delay: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the address that it told; it may open so many file descriptors."""
    given = ("--port", str(port), "--shutdown-delay", str(shutdown_delay), *options)
    command = [sys.executable, "-m", "monge", "serve", *given]
    if descriptors is not None:
        command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"serving built-in at (\S+)/v1", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()
