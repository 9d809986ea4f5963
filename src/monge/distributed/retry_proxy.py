"""Middleware for Ray Serve proxies.

It retries requests of lost replicas and reports errors in OpenAI format.

Without it, the client of a lost replica gets a bare 500 or a stream that breaks off.
"""

import json
import logging
from http import HTTPStatus
from typing import Any, Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monge.serve.errors import RETRY, ApiError

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

_MOST_SENT: Final = 2
"""A request that kills its replica must not reach all replicas."""
_MOST_KEPT: Final = 8 * 1024 * 1024
"""Largest body, in bytes, that is kept for a retry."""
_RAYS_OWN: Final = "/-/"
_EVENTS: Final = b"text/event-stream"
_LOG: Final = logging.getLogger("ray.serve")
_WORDS: Final = {
    404: "nothing is served here yet",
    408: "the request took too long",
    429: "too many requests wait; try again later",
    503: "no replica can take the request; try again later",
}


def middlewares() -> list[Middleware]:
    """Middlewares that Ray puts around its proxies, named in `CONTROLLER_OPTIONS`."""
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
        if scope["type"] != "http" or scope["path"].startswith(_RAYS_OWN):
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        for left in reversed(range(_MOST_SENT)):
            answer = _Answer(scope, body, send)
            # The proxy writes into the scope.
            await self._app(
                {**scope, "headers": list(scope["headers"])}, body.from_start(), answer.take
            )
            if not (left and answer.is_missing and body.can_be_sent_again):
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
        return not self.has_left and self._size <= _MOST_KEPT

    def from_start(self) -> Receive:
        """Return a channel that repeats the received messages and then continues."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if place < len(self._messages):
                message = self._messages[place]
            else:
                message = await self._receive()
                self._note(message)
            place = min(place + 1, len(self._messages))
            return message

        return receive

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.has_left = True
            return
        self._size += len(message.get("body", b""))
        if self._size <= _MOST_KEPT:
            self._messages.append(message)
        else:
            self._messages.clear()


class _Answer:
    """The answer to one attempt; the head is held until the body begins."""

    def __init__(self, scope: Scope, body: _Body, send: Send) -> None:
        self._scope, self._body, self._send = scope, body, send
        self._head: Message | None = None
        self._has_begun = self._has_ended = False

    @property
    def is_missing(self) -> bool:
        """True if the client has received nothing yet."""
        return not self._has_begun

    async def take(self, message: Message) -> None:
        """Forward a message."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        is_last = not message.get("more_body", False)
        if self._head is not None and _is_foreign(self._head):
            if is_last:
                await self._send_error(_error_of(self._head))
            return
        if not self._has_begun and self._head is not None:
            self._has_begun = True
            await self._send(self._head)
        self._has_ended = is_last
        await self._send(message)

    async def finish(self) -> None:
        """End the answer if the replica has not."""
        if self._has_ended or self._body.has_left:
            return
        lost = "the replica that served this request was lost; send it again: the same seed gives the same text"
        error = ApiError(503, lost, code="replica_lost", headers=RETRY)
        if not self._has_begun:
            await self._send_error(error)
        elif self._head is not None and _content_type(self._head).startswith(_EVENTS):
            # A half-written event must not run into this one.
            event = f"\n\ndata: {json.dumps(error.body())}\n\n"
            await self._send(
                {"type": "http.response.body", "body": event.encode(), "more_body": False}
            )

    async def _send_error(self, error: ApiError) -> None:
        self._has_begun = self._has_ended = True
        await error.response()(self._scope, self._body.from_start(), self._send)


def _is_foreign(head: Message) -> bool:
    """Return whether it is an error of the proxy; errors of a replica are JSON."""
    return head["status"] >= HTTPStatus.BAD_REQUEST and not _content_type(head).startswith(
        (b"application/json", _EVENTS)
    )


def _error_of(head: Message) -> ApiError:
    status = head["status"]
    again = RETRY if status in {429, 503} else {}
    return ApiError(
        status,
        _WORDS.get(status, HTTPStatus(status).phrase.lower()),
        code="not_served",
        headers=again,
    )


def _content_type(head: Message) -> bytes:
    return dict(head["headers"]).get(b"content-type", b"")
