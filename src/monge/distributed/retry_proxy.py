"""Middleware for Ray Serve proxies: retries requests of lost replicas, reports errors as OpenAI does.

Without it, the client of a lost replica gets a bare 500 or a stream that breaks off.
"""

import json
import logging
from http import HTTPStatus
from typing import Any, Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monge.serve.api.errors import RETRY, ApiError

CONTROLLER_OPTIONS: Final[dict[str, Any]] = {
    "runtime_env": {
        "env_vars": {
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares",
            # The proxies import this package, which takes seconds on a busy machine.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        }
    }
}
"""Options of `serve.start`, or of a configuration file, that install `middlewares` in the proxies."""

_MAX_ATTEMPTS: Final = 2
"""A request that kills its replica must not reach all replicas."""
_MAX_KEPT_BYTES: Final = 8 * 1024 * 1024
"""Largest body that is kept for a retry."""
_EVENTS: Final = b"text/event-stream"
_LOG: Final = logging.getLogger("ray.serve")
_MESSAGES: Final = {
    404: "nothing is served here yet",
    408: "the request took too long",
    429: "too many requests wait; try again later",
    503: "no replica can take the request; try again later",
}


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray puts around its proxies; see `CONTROLLER_OPTIONS`."""
    return [Middleware(RetryProxy)]


class RetryProxy:
    """Retries a request once if its replica is lost before it answers.

    While the client has received nothing, the request can go to another replica. An answer that has
    begun is ended: a stream with an error event, any other answer by closing the connection.

    Args:
        app: The proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request and its answer."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Ray's own pages
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            answer = _Attempt(scope, body, send)
            # The proxy writes into the scope.
            own_scope = {**scope, "headers": list(scope["headers"])}
            await self._app(own_scope, body.from_start(), answer.take)
            if answer.has_begun or not attempts_left or not body.can_be_sent_again:
                await answer.finish()
                return
            _LOG.warning(
                "%s: the replica was lost before it answered; the request is sent to another one",
                scope["path"],
            )


class _Body:
    """The received part of a request body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages = list[Message]()
        self._size = 0
        self.has_left = False

    @property
    def can_be_sent_again(self) -> bool:
        """True if the client is connected, and the body is complete so far."""
        return not self.has_left and self._size <= _MAX_KEPT_BYTES

    def from_start(self) -> Receive:
        """Return a channel that repeats the received messages and then continues."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if place < len(self._messages):
                message = self._messages[place]
            else:
                message = await self._receive()
                self._keep(message)
            place = min(place + 1, len(self._messages))
            return message

        return receive

    def _keep(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.has_left = True
            return
        self._size += len(message.get("body", b""))
        if self._size <= _MAX_KEPT_BYTES:
            self._messages.append(message)
        else:
            self._messages.clear()


class _Attempt:
    """The answer to an attempt; its head is held until the body begins."""

    def __init__(self, scope: Scope, body: _Body, send: Send) -> None:
        self._scope, self._body, self._send = scope, body, send
        self._head: Message = {}
        self.has_begun = self._has_ended = False

    async def take(self, message: Message) -> None:
        """Forward a message."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        is_last = not message.get("more_body", False)
        # Errors of a replica are JSON, those of the proxy are not.
        status = self._head.get("status", 0)
        if status >= HTTPStatus.BAD_REQUEST and not self._is(b"application/json", _EVENTS):
            if is_last:
                text = _MESSAGES.get(status, HTTPStatus(status).phrase.lower())
                headers = RETRY if status in {429, 503} else {}
                await self._send_error(ApiError(status, text, code="not_served", headers=headers))
            return
        if not self.has_begun and self._head:
            self.has_begun = True
            await self._send(self._head)
        self._has_ended = is_last
        await self._send(message)

    async def finish(self) -> None:
        """End the answer if the replica has not."""
        if self._has_ended or self._body.has_left:
            return
        text = "the replica that served this request was lost; send it again: the same seed gives the same text"
        error = ApiError(503, text, code="replica_lost", headers=RETRY)
        if not self.has_begun:
            await self._send_error(error)
        elif self._is(_EVENTS):
            # A half-written event must not run into this one.
            event = f"\n\ndata: {json.dumps(error.body())}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send_error(self, error: ApiError) -> None:
        self.has_begun = self._has_ended = True
        await error.response()(self._scope, self._body.from_start(), self._send)

    def _is(self, *types: bytes) -> bool:
        return dict(self._head["headers"]).get(b"content-type", b"").startswith(types)
