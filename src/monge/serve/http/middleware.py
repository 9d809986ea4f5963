"""Middleware: keys, host names, ids and figures of requests, the size and the time of bodies."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monge.page.files import FILES
from monge.serve.api.errors import RETRY, ApiError
from monge.serve.observe.logs import REQUESTS
from monge.serve.observe.metrics import ServerMetrics

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/version", *FILES})
"""Paths for monitoring, and the page. If the server has keys, all other paths need a key, unknown
paths included."""

_HEADER_BYTES: Final = 4096
_FREE_BYTES: Final = 1 << 16
CLOSE: Final = {"connection": "close"}
"""Closes the connection, so that the rest of a body is not read."""
REQUEST_ID: Final = "x-request-id"
IGNORED: Final = "x-monge-ignored"
"""Header of an answer with the fields of the request that changed nothing."""
_ID: Final = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
_LONGEST_PATH: Final = 100
_LOG: Final = logging.getLogger(REQUESTS)


class Gate:
    """Refuses requests without a valid key, in constant time, or sent to a name that is not served.

    It names, counts and logs the others, too. The application finds `request_id` and the name of
    the `key` in `scope["state"]`, and writes into its `figures`, which the log shows, and into its
    `ignored`, the names of fields that a header shows.

    A web page can point its own name to the address of this machine after it is loaded (DNS
    rebinding). Its scripts can then reach a server on loopback, but they cannot hide the name.

    Args:
        app: The application that it wraps.
        keys: Returns names and keys; without keys, none is needed.
        hosts: Allowed names and addresses, without ports, IPv6 in brackets. If empty, any.
        metrics: Counts answers and tokens.
        endpoints: Known paths. All others count as `other`, so that clients cannot create label
            values.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Callable[[], Sequence[tuple[str, str]]],
        hosts: Sequence[str],
        metrics: ServerMetrics,
        endpoints: Sequence[str],
    ) -> None:
        self._app, self._metrics, self._endpoints = app, metrics, frozenset(endpoints)
        self._keys = keys
        self._hosts = frozenset(host.lower().encode() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived, state, status = time.perf_counter(), scope.setdefault("state", {}), 0
        sent = _header(scope, b"x-request-id").decode("latin-1")
        state["request_id"] = name = sent if _ID.fullmatch(sent) else secrets.token_hex(16)
        state["key"], state["figures"] = self._key_of(scope), dict[str, Any]()
        state["ignored"] = set[str]()

        def count(code: str | None) -> None:
            path = path_of(scope)
            endpoint = path if path in self._endpoints else "other"
            self._metrics.count_answer(endpoint, status, code or "none", state["key"] or "none")

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                count(state.get("error_code"))
                headers = [*message.get("headers", ()), (REQUEST_ID.encode(), name.encode())]
                if fields := ", ".join(sorted(state["ignored"])):
                    headers.append((IGNORED.encode(), fields.encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            if (error := self._error(scope)) is not None:
                await _refuse(error, scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception:
            if status == 0:
                status = 500
                count("internal_error")
            raise
        finally:
            figures = state["figures"]
            self._metrics.count_tokens(state["key"], figures)
            target = scope.get("raw_path", b"")[:_LONGEST_PATH].decode("ascii", "replace")
            fields = {"request_id": name, "key": state["key"], "code": state.get("error_code")}
            fields |= {"duration_s": round(time.perf_counter() - arrived, 4)} | figures
            shown = {field: value for field, value in fields.items() if value not in {None, ""}}
            _LOG.info("%s %s %d", scope["method"], target, status, extra={"fields": shown})

    def _error(self, scope: Scope) -> ApiError | None:
        sent = {_without_port(value) for name, value in scope["headers"] if name == b"host"}
        if self._hosts and not self._hosts.issuperset(sent):
            text = (
                "the Host header of this request is no name of this server; send it to localhost "
                "or 127.0.0.1, or start the server with --allowed-host NAME or with an API key"
            )
            return ApiError(403, text, code="host_not_allowed", headers=CLOSE)
        if self._keys() and path_of(scope) not in OPEN_PATHS and not scope["state"]["key"]:
            text = "this server needs an API key; send the header `Authorization: Bearer KEY`"
            bearer = {"www-authenticate": "Bearer"}
            return ApiError(401, text, code="invalid_api_key", headers=bearer)
        return None

    def _key_of(self, scope: Scope) -> str:
        """Return the name of the key that a request brings; empty if it brings none."""
        scheme, _, key = _header(scope, b"authorization")[:_HEADER_BYTES].partition(b" ")
        owner = ""
        for name, known in self._keys():  # all keys, so that the time reveals nothing
            if hmac.compare_digest(key.strip(), known.encode()):
                owner = name
        return owner if scheme.lower() == b"bearer" else ""


class BoundedBodies:
    """Reads the whole body first, and refuses it if it is too large or too slow.

    The application pops the body from `scope["state"]["body"]`, so that it has the only reference,
    and calls `scope["state"]["release_body"]()` when it has dropped it.

    Args:
        app: The application that it wraps.
        max_bytes: Largest body.
        max_held_bytes: Bytes of all bodies that are held at a time; the first 64 KiB of each do not
            count, so that large bodies do not keep small bodies out.
        timeout_s: Seconds until the body must be complete.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, max_held_bytes: int, timeout_s: float | int
    ) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s
        self._max_held_bytes, self._num_held_bytes = max(max_bytes, max_held_bytes), 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_counted = 0

        def hold(size: int) -> bool:
            """Count a body of this size, and return whether it is large; 0 stops counting it."""
            nonlocal num_counted
            before, num_counted = num_counted, max(0, size - _FREE_BYTES)
            self._num_held_bytes += num_counted - before
            return num_counted > 0

        state = scope.setdefault("state", {})
        state["release_body"] = partial(hold, 0)
        try:
            read = self._read(scope, receive, hold)
            state["body"] = await asyncio.wait_for(read, self._timeout_s)
        except TimeoutError:
            text = f"the body took longer than {self._timeout_s:g} s"
            error = ApiError(408, text, code="slow_body", headers=CLOSE)
            await _refuse(error, scope, receive, send)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
        else:
            if state["body"] is not None:
                await self._app(scope, receive, send)
        finally:
            hold(0)

    async def _read(
        self, scope: Scope, receive: Receive, hold: Callable[[int], bool]
    ) -> bytes | None:
        """Return the body, or `None` if the client disconnected."""
        declared, body, is_large = _header(scope, b"content-length"), bytearray(), False
        if declared.isdigit():
            self._check_size(int(declared[:20]))
        while True:
            if is_large:  # one large body a turn of the event loop, so that others come between
                async with self._turn:
                    await asyncio.sleep(0)
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            is_large = hold(len(body))
            self._check_size(len(body))
            if is_large and self._num_held_bytes > self._max_held_bytes:
                text = f"{self._max_held_bytes} bytes of large bodies are waiting to be read; retry later"
                raise ApiError(429, text, code="bodies_full", headers=RETRY | CLOSE)
            if not message.get("more_body", False):
                return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            text = f"the body is larger than {self._max_bytes} bytes, this server's limit"
            raise ApiError(413, text, code="request_too_large", headers=CLOSE)


def path_of(scope: Scope) -> str:
    """Return the path of a request, without the root path that a proxy takes off."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.strip().lower().rpartition(b":")
    return (name if colon and port.isdigit() else host.strip().lower()).removesuffix(b".")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    scope.setdefault("state", {})["error_code"] = error.code
    await error.response()(scope, receive, send)
