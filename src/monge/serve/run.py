"""Running the application behind uvicorn."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from typing import Final

import uvicorn
from fastapi import FastAPI

from monge.core.errors import OptionError
from monge.engine.garbage import settle_objects

_LARGEST_PORT: Final = 65535
_BACKLOG: Final = 2048
_KEEP_ALIVE_S: Final = 30
_TELL_S: Final = 10
"""Seconds in which jobs that were ended are to be answered: the round that runs comes first."""


class _Drained(uvicorn.Server):
    """Ends the jobs that are left when their time is over, so that clients are told; uvicorn would only close connections.

    Args:
        config: The server's.
        end_jobs: Ends all jobs; it may take a round.
        drain_s: Seconds that they get.
    """

    def __init__(self, config: uvicorn.Config, end_jobs: Callable[[], None], drain_s: int) -> None:
        super().__init__(config)
        self._end_jobs, self._drain_s = end_jobs, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for those that there are."""
        late = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_s)
        await asyncio.to_thread(self._end_jobs)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, to be closed by whoever asks; made before models load, so that a taken port is known at once.

    Args:
        host: Name or address.
        port: 0 takes any free one.

    Raises:
        OptionError: If the address is taken or is none of this machine's.
    """
    if not 0 <= port <= _LARGEST_PORT:  # the resolver would take it modulo 65536
        raise OptionError(f"--port must lie in 0..{_LARGEST_PORT}; got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_told(app: FastAPI, listener: socket.socket, *, drain_s: int, access_log: bool = False) -> None:
    """Serve until SIGTERM or SIGINT: then no more requests are taken, and those that run are finished.

    Args:
        app: The application, made by `create_app`.
        listener: Where to listen.
        drain_s: Seconds that running requests get; after that they are answered with a 503.
        access_log: Whether every request is written to the log.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # bounds the size of headers
        log_level=logging.INFO if access_log else logging.WARNING,
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s + _TELL_S,
    )
    # uvicorn raises the signal once more when it is done; having drained is no failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settle_objects()
    try:
        _Drained(config, app.state.end_jobs, drain_s).run(sockets=[listener])
    finally:
        gc.unfreeze()  # frozen objects outlive the interpreter, and extensions call that a leak
