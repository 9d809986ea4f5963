"""Errors in the shape that clients of the OpenAI API read."""

import difflib
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

from fastapi.responses import JSONResponse

from monge.core.errors import ContextLengthError, MongeError, OptionError
from monge.serve.generation import QueueFullError, SchedulerClosedError
from monge.serve.schemas import FIELD_NAMES, MOST_SHOWN

RETRY_AFTER_S: Final = 1
"""Seconds in the `retry-after` header when the queue is full."""

TOO_LONG: Final = "context_length_exceeded"
"""Error code of a request that is longer than the server allows."""

_CODES: Final = {"extra_forbidden": "unknown_parameter"}
_LONGEST_NAME: Final = 60
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: What is wrong and what to do; shown to the client.
        param: The field that caused the error.
        code: A word for programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        # They may repeat the name of a field, which need not be text.
        self.message = message.encode(errors="replace").decode()
        self.param = param and param.encode(errors="replace").decode()
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be honoured: 400."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def of_monge(error: MongeError) -> ApiError | None:
    """Return the answer to an error of the library, or `None` if the request did not cause it.

    Errors of the request become 400, errors of the queue 429 and 503.
    """
    if isinstance(error, QueueFullError):
        again = {"retry-after": str(RETRY_AFTER_S)}
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="queue_full", headers=again)
    if isinstance(error, SchedulerClosedError):
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", code="shutting_down"
        )
    if isinstance(error, ContextLengthError):
        return refused(str(error), code=TOO_LONG)
    return refused(str(error)) if isinstance(error, OptionError) else None


def internal(error_id: str) -> ApiError:
    """Return the answer to an internal error; the log has the details under this id."""
    message = f"internal error {error_id}; the server's log says more under this name"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def of_validation(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """Return the answer to a body that does not fit the schema; it repeats no values.

    Args:
        errors: Errors of pydantic, at least one. Only the first few different ones are used.
    """
    said: dict[str, Mapping[str, Any]] = {}
    for error in errors:
        said.setdefault(_sentence(error), error)
        if len(said) > MOST_SHOWN:
            break
    first, *_ = said.values()
    codes = [_CODES[error["type"]] for error in said.values() if error["type"] in _CODES]
    more = "; and more" if len(said) > MOST_SHOWN else ""
    text = "; ".join(islice(said, MOST_SHOWN)) + more
    return refused(text, _clipped(_where(first)) or None, codes[0] if codes else None)


def _sentence(error: Mapping[str, Any]) -> str:
    where, kind = _where(error), str(error["type"])
    if kind == "extra_forbidden":
        name = str(error["loc"][-1])
        near = (
            difflib.get_close_matches(name, FIELD_NAMES, n=1) if len(name) <= _LONGEST_NAME else []
        )
        if name in near:
            return f"unknown field {where!r}: it belongs to another endpoint or another object"
        return f"unknown field {_clipped(where)!r}" + (
            f"; did you mean {near[0]!r}?" if near else ""
        )
    if kind == "missing":
        return f"{where}: required"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not where and kind.startswith(("model_attributes", "dict", "model")):
        message = "the body must be a JSON object, sent with content-type application/json"
    return f"{where}: {message}" if where else message


def _where(error: Mapping[str, Any]) -> str:
    """Return the field as a client writes it, such as `messages.0.content`."""
    parts = error["loc"]
    if error["type"] == "extra_forbidden":
        return ".".join(
            map(
                str,
                [
                    *(part for part in parts[:-1] if isinstance(part, int) or part in FIELD_NAMES),
                    parts[-1],
                ],
            )
        )
    return ".".join(str(part) for part in parts if isinstance(part, int) or part in FIELD_NAMES)


def _clipped(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
