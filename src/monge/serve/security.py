"""Middlewares: keys, host names, sizes, timeouts, and a counter of answers."""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monge.serve.errors import RETRY_AFTER_S, ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Paths for monitoring. If there are keys, all other paths need one, unknown paths included."""

_HEADER_BYTES: Final = 4096
_FREE_BYTES: Final = 1 << 16
CLOSE: Final = {"connection": "close"}
"""Closes the connection, so that the rest of a body is not read."""


class CountedAnswers:
    """Reports the endpoint, status and error code of every answer.

    Args:
        app: What answers.
        count: Called with `(endpoint, status, code)`.
        endpoints: Known paths. All others count as `other`, so that clients cannot create label
            values.
    """

    def __init__(
        self, app: ASGIApp, count: Callable[[str, int, str], None], endpoints: Sequence[str]
    ) -> None:
        self._app, self._count, self._endpoints = app, count, frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = scope["path"] if scope["path"] in self._endpoints else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(
                    endpoint,
                    int(message["status"]),
                    str(scope.get("state", {}).get("error_code") or "none"),
                )
            await send(message)

        await self._app(scope, receive, counted)


class ApiKeyGate:
    """Refuses requests without a valid key, in constant time.

    Args:
        app: What answers.
        keys: The keys; without keys, every request passes.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["path"] in OPEN_PATHS
            or self._brings_key(scope)
        ):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "this server needs an API key; send the header `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await _refuse(error, scope, receive, send)

    def _brings_key(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent[:_HEADER_BYTES].partition(b" ")
        found = False
        for known in self._keys:  # all keys, so that the time reveals nothing
            found |= hmac.compare_digest(key.strip(), known)
        return found and scheme.lower() == b"bearer"


class AllowedHosts:
    """Refuses requests whose `Host` header has another name.

    A web page can point its own name to the address of this machine after it is loaded (DNS
    rebinding). Its scripts can then reach a server on loopback, but they cannot hide the name.

    Args:
        app: What answers.
        hosts: Allowed names and addresses, without ports, IPv6 in brackets. If empty, every request
            passes.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower().encode() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        sent = [_without_port(value) for name, value in scope.get("headers", ()) if name == b"host"]
        if scope["type"] != "http" or not self._hosts or self._hosts.issuperset(sent):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            HTTPStatus.FORBIDDEN,
            "the Host header of this request is no name of this server; send it to localhost or "
            "127.0.0.1, or start the "
            "server with --allowed-host NAME or with an API key",
            code="host_not_allowed",
            headers=CLOSE,
        )
        await _refuse(error, scope, receive, send)


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.strip().lower().rpartition(b":")
    return (name if colon and port.isdigit() else host.strip().lower()).removesuffix(b".")


class BoundedBodies:
    """Reads the whole body first, and refuses it if it is too large or too slow.

    `scope["state"]["release_body"]()` says that nobody holds the body any more, before the answer
    does.

    Args:
        app: What answers.
        max_bytes: Largest body.
        max_held_bytes: Bytes of all bodies that are held at a time; the first 64 KiB of each do not
            count, so that large ones do not keep others out.
        timeout_s: Seconds until the body must be complete.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, max_held_bytes: int, timeout_s: float | int
    ) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s
        self._max_held_bytes, self.num_held_bytes = max(max_bytes, max_held_bytes), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH"}:
            await self._app(scope, receive, send)
            return
        share = _Share(self)
        scope.setdefault("state", {})["release_body"] = partial(share.grow, 0)
        try:
            try:
                body = await asyncio.wait_for(self._read(scope, receive, share), self._timeout_s)
            except TimeoutError:
                text = f"the body took longer than {self._timeout_s:g} s"
                error = ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="slow_body", headers=CLOSE)
                await _refuse(error, scope, receive, send)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
            else:
                if body is not None:
                    await self._app(scope, _replayed(body, receive), send)
        finally:
            share.grow(0)

    async def _read(self, scope: Scope, receive: Receive, share: "_Share") -> bytes | None:
        """Return the body, or `None` if the client disconnected."""
        declared = next(
            (value for name, value in scope["headers"] if name == b"content-length"), b""
        )
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            share.grow(len(body))
            if len(body) > self._max_bytes:
                raise self._too_large()
            if share.num_bytes and self.num_held_bytes > self._max_held_bytes:
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"{self._max_held_bytes} bytes of large bodies are waiting to be read, as many "
                    "as may; try again later",
                    code="bodies_full",
                    headers={"retry-after": str(RETRY_AFTER_S)} | CLOSE,
                )
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._max_bytes} bytes, this server's limit"
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, code="request_too_large", headers=CLOSE
        )


@dataclass(slots=True)
class _Share:
    """Bytes of one body among those of all that are held."""

    bodies: BoundedBodies
    num_bytes: int = 0

    def grow(self, size: int) -> None:
        """Count a body of this size; 0 counts it no more."""
        counted = max(0, size - _FREE_BYTES)
        self.bodies.num_held_bytes += counted - self.num_bytes
        self.num_bytes = counted


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read before, and then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    scope.setdefault("state", {})["error_code"] = error.code
    await error.response()(scope, receive, send)
