"""Runs the application with uvicorn."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
import time
from functools import partial
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from monge.core.errors import OptionError
from monge.options import ServeOptions
from monge.runtime.process import settle_objects
from monge.serve.http.connections import (
    Connection,
    ConnectionLimits,
    limits_of_process,
    log_exhaustion,
    raise_descriptor_limit,
)
from monge.serve.observe.logs import log_config_of

_LOG: Final = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 30
_TICK_S: Final = 0.1
_TELL_S: Final = 10
"""Seconds for the answers of ended generations, which come after the current round."""

_HUNG_S: Final = 15
"""Seconds after which a server that was to have ended by then hangs."""


class GracefulServer(uvicorn.Server):
    """Ends the remaining generations after the graceful timeout, so that their clients get an error.

    Uvicorn alone would only close their connections.

    Args:
        app: The application, made by `create_app`.
        options: Of the process: its times, root path and TLS.
        exits: Whether the process ends, with status 1, if the server does not.
        limits: Of its connections; `None` for those of this process.
        **config: Further options of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        options: ServeOptions,
        *,
        exits: bool = False,
        limits: ConnectionLimits | None = None,
        **config: Any,
    ) -> None:
        limits = limits or limits_of_process()
        defaults: dict[str, Any] = {
            "http": partial(Connection, limits=limits),  # h11's, which bounds the size of headers
            "ws": "none",
            "log_level": logging.WARNING,
            "access_log": False,  # `Gate` logs requests
            "root_path": options.root_path,
            "ssl_keyfile": options.ssl_keyfile,
            "ssl_certfile": options.ssl_certfile,
            "server_header": False,
            "backlog": limits.backlog,
            "timeout_keep_alive": _KEEP_ALIVE_S,
            "timeout_graceful_shutdown": options.graceful_timeout_s + _TELL_S,
        }
        super().__init__(uvicorn.Config(app, **defaults | config))
        self._state, self._options = app.state, options
        patience_s = options.graceful_timeout_s + _TELL_S + _HUNG_S
        self._exit_timer = threading.Timer(patience_s, _exit) if exits else None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        try:
            super().run(sockets)
        finally:
            if self._exit_timer is not None:
                self._exit_timer.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(log_exhaustion)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Report not ready, then refuse new connections, and wait for the open connections."""
        self._state.leave()
        is_told = signal.SIGTERM in self._captured_signals
        end = time.monotonic() + self._options.shutdown_delay_s * is_told
        while time.monotonic() < end and signal.SIGINT not in self._captured_signals:
            await asyncio.sleep(_TICK_S)
        if self._exit_timer is not None:
            self._exit_timer.daemon = True
            self._exit_timer.start()
        late = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(self._options.graceful_timeout_s)
        self._state.end_reading()
        await asyncio.to_thread(self._state.end_generations)


def _exit() -> None:
    """End the process though some of its threads do not."""
    _LOG.critical("the server did not end in time: the process exits at once")
    logging.shutdown()
    os._exit(1)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, which the caller closes.

    It is opened before models load, so that a port in use is reported at once.

    Args:
        host: Name or address.
        port: 0 takes any free port.

    Raises:
        OptionError: If the address is taken or is none of this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        backlog = limits_of_process().backlog
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from error
    # Accepted sockets inherit it; asyncio sets it for sockets that name their protocol only.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket, *, is_secure: bool = False) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve_until_signal(app: FastAPI, listener: socket.socket, options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests that run.

    Args:
        app: The application, made by `create_app`.
        listener: A listening socket.
        options: As for `GracefulServer`.
    """
    raise_descriptor_limit()
    log_config = log_config_of(options.log_format, logs_requests=options.access_log)
    server = GracefulServer(app, options, exits=True, log_config=log_config)
    # uvicorn raises the signal once more when it is done; that is no failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settle_objects()
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()  # frozen objects outlive the interpreter, and extensions call that a leak
