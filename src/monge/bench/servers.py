"""Servers to put under load: `monge serve`, and those of other engines beside it."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final
from urllib.parse import urlsplit

from monge.api import built_in
from monge.core.errors import MongeError, OptionError

_STARTED: Final = re.compile(r"at http://(\S+):(\d+)/v1")
_START_S: Final = 1200.0
"""Some engines compile before they answer."""
_ASK_S: Final = 5.0
_STOP_S: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server.

    Args:
        host: Where it is.
        port: Its port.
        fields: Fields of its requests in place of ours; `None` leaves a field out.
        version: What it says of its version, if anything.
        pid: Its process, if it was started here.
    """

    host: str
    port: int
    pid: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str | None = None

    def body(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """A request in its own words."""
        return {name: value for name, value in {**ours, **self.fields}.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A server of another engine, which answers `/health` and streams `/v1/completions`.

    Args:
        where: Its address, or the command that starts it on this machine, without a shell; in a
            command `{port}` stands for a free port and `{target}` for the folder or name of the
            target.
        fields: Fields of its requests in place of ours; `None` leaves a field out.

    Raises:
        OptionError: If it is neither.
    """

    where: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        address = self.address
        if address is not None and (address[0] is None or urlsplit(self.where).scheme != "http"):
            raise OptionError(f"a running server is named as http://host:port; got {self.where!r}")
        if address is None and "{port}" not in self.where:
            raise OptionError(
                f"a command that starts a server has {{port}} where the port goes; "
                f"got {self.where!r}"
            )

    @property
    def address(self) -> tuple[str | None, int] | None:
        """Host and port of one that runs already."""
        parts = urlsplit(self.where)
        return (parts.hostname, parts.port or 80) if "://" in self.where.split(" ", 1)[0] else None


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[Server]:
    """A `monge serve` process on a free port.

    Raises:
        MongeError: If it does not start; with what it said.
    """
    command = [sys.executable, "-m", "monge", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = list[str]()
        try:
            for line in process.stderr:
                said.append(line)
                if (found := _STARTED.search(line)) is not None:
                    # Read on, or a talkative server would wait for room in the pipe.
                    threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
                    yield Server(host=found[1], port=int(found[2]), pid=process.pid)
                    return
            raise MongeError(f"the server did not start: {' '.join(''.join(said).split())}")
        finally:
            _stop(process)


@contextmanager
def running_beside(beside: Beside, arguments: Sequence[str]) -> Iterator[Server]:
    """A server of another engine, started unless it runs already.

    Args:
        beside: Which.
        arguments: Arguments of every `monge serve`; the first names the target, unless it is an
            option.

    Raises:
        MongeError: If it does not start, or does not answer; with the last line that it said.
    """
    if beside.address is not None:
        host, port = beside.address
        yield _ready(str(host), port, beside)
        return
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    target = str(
        built_in("target")
        if named is None
        else Path(named).resolve()
        if Path(named).exists()
        else named
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        word.replace("{port}", str(port)).replace("{target}", target)
        for word in shlex.split(beside.where)
    ]
    # Its own packages, not ours; its own group, since such servers have helpers that must end with
    # them.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, stdout=said, stderr=said, env=inherited, start_new_session=True
            )
        except OSError as error:
            raise MongeError(f"{command[0]!r} cannot be started: {error}") from error
        try:
            yield _ready("127.0.0.1", port, beside, process)
        except _NotReadyError as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise MongeError(
                f"{command[0]!r} {error}: {lines[-1][:300] if lines else 'it said nothing'}"
            ) from error
        finally:
            _stop(process, group=True)


class _NotReadyError(MongeError):
    """It has ended, or it does not answer."""


def _ready(
    host: str, port: int, beside: Beside, process: subprocess.Popen[bytes] | None = None
) -> Server:
    end = time.monotonic() + _START_S
    while _get(host, port, "/health") is None:
        if process is None:
            raise MongeError(f"nothing answers at http://{host}:{port}/health")
        if process.poll() is not None:
            raise _NotReadyError(f"ended with status {process.returncode}")
        if time.monotonic() > end:
            raise _NotReadyError(f"did not answer within {_START_S:g} s")
        time.sleep(0.5)
    pid = None if process is None else process.pid
    return Server(
        host=host,
        port=port,
        pid=pid,
        fields=beside.fields,
        version=_version(_get(host, port, "/version")),
    )


def _version(told: bytes | None) -> str | None:
    try:
        found = json.loads(told or b"{}")
    except ValueError:
        return None
    return str(found["version"]) if isinstance(found, dict) and "version" in found else None


def _get(host: str, port: int, path: str) -> bytes | None:
    """What is there, if anything is."""
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _stop(process: subprocess.Popen[Any], *, group: bool = False) -> None:
    def send(number: signal.Signals) -> None:
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    if process.poll() is None:
        send(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            send(signal.SIGKILL)
            process.wait()
