"""What one connection may take: seconds to say what it wants, a place among a bounded number, and lines in the log."""

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from monge.serve.errors import RETRY_AFTER_S, ApiError
from monge.serve.security import CLOSE, OPEN_PATHS

_LOG: Final = logging.getLogger(__name__)
_MOST: Final = 4096
_FREE_CHUNKS: Final = 256
_BYTES_PER_CHUNK: Final = 256
_NO_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_QUIET_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of a server's connections.

    Args:
        max_connections: Connections that are served at a time.
        backlog: Connections that the system holds until they are taken. As many are kept open
            beyond `max_connections`, to answer probes, and others with a 503.
        header_timeout_s: Seconds from the first byte of a request, or from the connection, to the
            end of its headers.
        body_timeout_s: Seconds from there to the end of its body.
        write_timeout_s: Seconds in which a client that is sent something must take some of it.
    """

    max_connections: int
    backlog: int = 128
    header_timeout_s: float | int = 10
    body_timeout_s: float | int = 40
    write_timeout_s: float | int = 30


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard one, as far as connections need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _MOST if hard == resource.RLIM_INFINITY else min(hard, 4 * _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limits_of_process(**others: float | int) -> ConnectionLimits:
    """Limits that leave this process half of the file descriptors that it has not opened yet.

    Args:
        **others: Further fields of the limits.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (
        max(4, soft - sum(1 for _ in Path("/dev/fd").iterdir()))
        if soft != resource.RLIM_INFINITY
        else 4 * _MOST
    )
    # Together they stay below what is free, since a burst is taken from the backlog before any
    # connection is closed.
    return ConnectionLimits(
        max_connections=min(_MOST, free // 2), backlog=min(128, free // 4), **others
    )  # pyright: ignore[reportArgumentType]


class _Parser(h11.Connection):
    """Refuses bodies in tiny chunks.

    Parsing a chunk costs the event loop as much as copying kilobytes, whatever its size.
    """

    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:  # noqa: ANN401 (an event, or a mark that is no type)
        """Return the next part of a request.

        Raises:
            RemoteProtocolError: If it is not HTTP, or its chunks are too small.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK:
                raise h11.RemoteProtocolError("tiny chunks")
        return event


class Connection(H11Protocol):
    """An HTTP/1.1 connection that is closed if its client takes too long.

    uvicorn bounds only the time between two requests. If too many connections are open, the one
    that has kept the server waiting for a request the longest is closed. If all of them are served,
    a further one gets a 503, except for monitoring.

    Args:
        limits: What is allowed.
        **options: Of uvicorn's.
    """

    def __init__(self, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER)
        self.app, self._application = self._answer, self.app
        self._limits = limits
        self._waits_for: Literal["headers", "body"] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self.is_dropped = self._is_beyond = self._is_refused = False

    @property
    def is_served(self) -> bool:
        """Whether it has a whole request that is not answered yet."""
        return (
            self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._wait_for("headers")
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_full = self._is_beyond and len(self.connections) > self._limits.max_connections
        if is_full and scope["path"] not in OPEN_PATHS:
            error = ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "all connections of this server are in use; try again later",
                code="too_many_connections",
                headers={"retry-after": str(RETRY_AFTER_S)} | CLOSE,
            )
            await error.response()(scope, receive, send)
        else:
            await self._application(scope, receive, send)

    def _make_room(self) -> None:
        _LOG.warning(
            "%d connections are open, as many as may be: those that have asked for nothing "
            "the longest are closed, and further ones get a 503 "
            "(`ulimit -n` bounds the number; told once a minute)",
            self._limits.max_connections,
        )
        others = [
            one
            for one in self.connections - {self}
            if isinstance(one, Connection) and not one.is_dropped
        ]
        waiting = [one for one in others if not one.is_served]
        silent = [one for one in waiting if not one._is_beyond]
        self._is_beyond = not silent
        if not silent and len(others) < self._limits.max_connections + self._limits.backlog:
            return
        min(silent or waiting or [self], key=lambda one: one._since).drop()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or not in reasonable chunks; what else comes is not parsed."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:  # it has an answer
            self.drop()
            return
        text = (
            "this is not HTTP/1.1, or its body has too many small chunks; send a content-length, "
            "or chunks of at least a kilobyte"
        )
        answer = ApiError(
            HTTPStatus.BAD_REQUEST, text, code="invalid_http", headers=CLOSE
        ).response()
        head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
        events = (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        # The client closes when it has read this: if the server did, what it sends meanwhile would
        # reset the connection, and the answer would be lost.
        self._is_refused = True
        self._wait_for("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_for(None)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
        if self._is_refused:
            return
        state = self.conn.their_state
        self._wait_for(
            "headers" if state is h11.IDLE else "body" if state is h11.SEND_BODY else None
        )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # As long as nothing of the next request is here, uvicorn's own clock runs.
        if self.conn.their_state is h11.IDLE:
            unread, _ = self.conn.trailing_data
            self._wait_for("headers" if unread else None)

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

    def _wait_for(self, what: Literal["headers", "body"] | None) -> None:
        """Start the clock for the next part of a request, unless it is running.

        Stop it where nothing is waited for.
        """
        if what == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waits_for, self._since = what, self.loop.time()
        if what is not None:
            seconds = (
                self._limits.header_timeout_s if what == "headers" else self._limits.body_timeout_s
            )
            self._timer = self.loop.call_later(seconds, self.drop)


class RateLimited(logging.Filter):
    """Lets each warning pass once a minute, since clients can cause as many as they like."""

    def __init__(self) -> None:
        super().__init__()
        self._told = dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
        now, text = time.monotonic(), str(record.msg)
        if record.levelno == logging.WARNING and now - self._told.get(text, -_QUIET_S) < _QUIET_S:
            return False
        self._told[text] = now
        return True


def log_exhaustion(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """An exception handler for event loops.

    No traceback for every connection that cannot be taken.
    """
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
        _LOG.warning("a connection cannot be taken: %s (told once a minute)", error.strerror)
    else:
        loop.default_exception_handler(dict(context))
