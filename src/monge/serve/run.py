"""Runs the application with uvicorn."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from monge.core.errors import OptionError
from monge.engine.garbage import settle_objects
from monge.serve.connections import Connection, ConnectionLimits, RateLimited, limits_of_process, log_exhaustion

_LARGEST_PORT: Final = 65535
_KEEP_ALIVE_S: Final = 30
_TELL_S: Final = 10
"""Seconds for the answers of ended generations, which come after the current round."""


class Server(uvicorn.Server):
    """Ends the remaining generations after the drain period, so that their clients get an error.

    Uvicorn alone would only close their connections.

    Args:
        config: Configuration of uvicorn.
        end_generations: Ends all generations; it may take a round.
        drain_s: Seconds of the drain period.
    """

    def __init__(self, config: uvicorn.Config, end_generations: Callable[[], None], drain_s: int) -> None:
        super().__init__(config)
        self._end_generations, self._drain_s = end_generations, drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(log_exhaustion)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and wait for the open ones."""
        late = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_s)
        await asyncio.to_thread(self._end_generations)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, which the caller closes.

    It is opened before models load, so that a port in use is reported at once.

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
        return socket.create_server(address[:2], family=family, backlog=limits_of_process().backlog)
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(
    app: FastAPI, *, drain_s: int, access_log: bool = False, limits: ConnectionLimits | None = None, **options: Any
) -> Server:
    """Return a server that runs until a signal stops it.

    Args:
        app: The application, made by `create_app`.
        drain_s: Seconds that running requests get; the others get a 503.
        access_log: Whether every request is logged.
        limits: Of its connections; `None` for those of this process.
        **options: Further options of `uvicorn.Config`.
    """
    limits = limits or limits_of_process()
    protocol: Any = partial(Connection, limits=limits)
    config = uvicorn.Config(
        app,
        **{
            "http": protocol,  # h11's, which bounds the size of headers
            "ws": "none",
            "log_level": logging.INFO if access_log else logging.WARNING,
            "access_log": access_log,
            "server_header": False,
            "backlog": limits.backlog,
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "timeout_graceful_shutdown": drain_s + _TELL_S,
        }
        | options,
    )
    return Server(config, app.state.end_generations, drain_s)


def serve_until_signal(app: FastAPI, listener: socket.socket, *, drain_s: int, access_log: bool = False) -> None:
    """Serve until SIGTERM or SIGINT: then no more requests are taken, and those that run are finished.

    Args:
        app: The application, made by `create_app`.
        listener: Where to listen.
        drain_s: Seconds that running requests get; after that they are answered with a 503.
        access_log: Whether every request is written to the log.
    """
    server = server_of(app, drain_s=drain_s, access_log=access_log)
    # uvicorn raises the signal once more when it is done; having drained is no failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settle_objects()
    try:
        with _few_warnings():
            server.run(sockets=[listener])
    finally:
        gc.unfreeze()  # frozen objects outlive the interpreter, and extensions call that a leak


@contextmanager
def _few_warnings() -> Iterator[None]:
    """Warnings that clients can cause are written once a minute."""
    loggers, rate_limited = [logging.getLogger(name) for name in ("uvicorn.error", Connection.__module__)], RateLimited()
    for logger in loggers:
        logger.addFilter(rate_limited)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(rate_limited)
