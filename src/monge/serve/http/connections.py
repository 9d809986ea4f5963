"""Bounds of connections: the time to send headers, their number, and their lines in the log."""

import asyncio
import errno
import logging
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from monge.serve.api.errors import RETRY, ApiError
from monge.serve.http.middleware import CLOSE, OPEN_PATHS, path_of

_LOG: Final = logging.getLogger(__name__)
_MOST: Final = 4096
_FREE_CHUNKS: Final = 256
_BYTES_PER_CHUNK: Final = 256
_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})
_LONGEST_FAULT: Final = 200
_NO_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of a server's connections.

    Args:
        max_connections: Connections that are served at a time.
        backlog: Connections that the system holds until they are accepted. The same number is kept
            open beyond `max_connections`: probes are answered, other requests get a 503.
        header_timeout_s: Seconds from the first byte of a request, or from the connection, to the
            end of its headers, and from an early answer to the end of the body. The application
            bounds the time of other bodies.
        write_timeout_s: Seconds in which a client must take some of what it is sent.
    """

    max_connections: int
    backlog: int = 128
    header_timeout_s: float | int = 10
    write_timeout_s: float | int = 30


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors as connections need, at most to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _MOST if hard == resource.RLIM_INFINITY else min(hard, 4 * _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limits_of_process() -> ConnectionLimits:
    """Return limits that leave this process half of the file descriptors that it has not opened yet."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 4 * _MOST
    if soft != resource.RLIM_INFINITY:
        free = max(4, soft - sum(1 for _ in Path("/dev/fd").iterdir()))
    # Together they stay below what is free, since a burst is taken from the backlog before any
    # connection is closed.
    return ConnectionLimits(max_connections=min(_MOST, free // 2), backlog=min(128, free // 4))


class _Parser(h11.Connection):
    """Refuses requests with two lengths, and bodies in tiny chunks.

    A proxy may believe the other length, and take the rest of the body for another request.
    Parsing a chunk costs the event loop as much as copying kilobytes, whatever its size.
    """

    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:  # noqa: ANN401 (an event, or a mark that is no type)
        """Return the next part of a request.

        Raises:
            RemoteProtocolError: If it is not HTTP, has two lengths, or its chunks are too small.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if _LENGTHS.issubset(name for name, _ in event.headers):
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK:
                raise h11.RemoteProtocolError(
                    "too many small chunks; send a content-length, or chunks of at least a kilobyte"
                )
        return event


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed if its client takes too long.

    uvicorn bounds only the time between two requests. If too many connections are open, the server
    closes the connection whose request it has awaited longest. If all of them are being served, a
    further connection gets a 503, except for monitoring.

    Args:
        limits: Bounds of all connections.
        **options: Of uvicorn's protocol.
    """

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER)
        self.app, self._application = self._answer, self.app
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self.is_dropped = self._is_beyond = self._is_refused = False

    @property
    def is_served(self) -> bool:
        """True if it has a whole request that is not answered yet."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._time_headers(is_on=True)
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_full = self._is_beyond and len(self.connections) > self._limits.max_connections
        if is_full and path_of(scope) not in OPEN_PATHS:
            text = "all connections of this server are in use; retry later"
            error = ApiError(503, text, code="too_many_connections", headers=RETRY | CLOSE)
            await error.response()(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    def _make_room(self) -> None:
        _LOG.warning(
            "all %d connections are open: those that have asked for nothing the longest are "
            "closed, and further ones get a 503 "
            "(`ulimit -n` bounds the number; told once a minute)",
            self._limits.max_connections,
        )
        others = [
            one
            for one in self.connections - {self}
            if isinstance(one, Connection) and not one.is_dropped
        ]
        waiting = [connection for connection in others if not connection.is_served]
        silent = [connection for connection in waiting if not connection._is_beyond]
        self._is_beyond = not silent
        if silent or len(others) >= self._limits.max_connections + self._limits.backlog:
            min(silent or waiting or [self], key=lambda one: one._since).drop()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request for the error that is being handled; what else comes is not parsed."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:  # it has an answer
            self.drop()
            return
        fault = re.sub(r"bytearray\(b(.*)\)", r"\1", str(sys.exception()))
        text = f"malformed HTTP: {fault[:_LONGEST_FAULT]}"
        answer = ApiError(400, text, code="invalid_http", headers=CLOSE).response()
        head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
        events = (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        # Only this direction is closed: if both were, what the client sends meanwhile would reset
        # the connection, and the answer would be lost.
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._is_refused = True
        self._time_headers(is_on=True)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._time_headers(is_on=False)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
        if not self._is_refused:
            self._time_headers(is_on=self.conn.their_state is h11.IDLE or self._is_answered_early)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # As long as nothing of the next request is here, uvicorn's own clock runs.
        is_next = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        self._time_headers(is_on=is_next or self._is_answered_early)

    @property
    def _is_answered_early(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def drop(self) -> None:
        """Close it at once, whatever has not been sent."""
        self.is_dropped = True
        self.transport.abort()

    def _time_headers(self, *, is_on: bool) -> None:
        """Start the clock, unless it is running, or stop it."""
        if is_on == (self._header_timer is not None):
            return
        self._since = self.loop.time()
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self.drop)
        else:
            self._header_timer.cancel()
            self._header_timer = None


def log_exhaustion(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Handle exceptions of an event loop, without a traceback for each connection that is not accepted."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
        _LOG.warning("a connection cannot be taken: %s (told once a minute)", error.strerror)
    else:
        loop.default_exception_handler(dict(context))
