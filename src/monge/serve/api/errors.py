"""Errors in the shape that clients of the OpenAI API read."""

import difflib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from fastapi.responses import JSONResponse

from monge.core.errors import ContextLengthError, GrammarError, MongeError, OptionError
from monge.serve.api.fields import MOST_SHOWN
from monge.serve.api.schemas import FIELD_NAMES
from monge.serve.scheduling.generation import GenerationFinish, QueueFullError, SchedulerClosedError

RETRY: Final = {"retry-after": "1"}
"""Asks a client to come again after so many seconds."""
TOO_LONG: Final = "context_length_exceeded"
"""Error code of a request that is longer than the server allows."""
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
        """Return the JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the answer to a request that cannot be honoured: 400."""
    return ApiError(400, message, param=param, code=code)


def of_monge(error: MongeError) -> ApiError | None:
    """Return the answer to an error of the library, or `None` if the request did not cause it.

    Errors of the request become 400, errors of the queue 429 and 503.
    """
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers=RETRY)
    if isinstance(error, SchedulerClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, ContextLengthError):
        return refused(str(error), code=TOO_LONG)
    return refused(str(error)) if isinstance(error, OptionError) else None


def failure(reason: GenerationFinish, response_id: str, cause: Exception | None = None) -> ApiError:
    """Return the error of a generation that did not end well; a cause that is no fault of its grammar is for the log."""
    if isinstance(cause, GrammarError):
        return refused(str(cause), code="grammar_not_followed")
    if reason == "deadline":
        text = "the request took longer than this server allows; ask for fewer tokens"
        return ApiError(504, text, code="request_timeout")
    if reason == "cancelled":
        return ApiError(503, "the server ended the request to shut down", code="shutting_down")
    return internal(response_id)


def internal(error_id: str) -> ApiError:
    """Return the answer to an internal error; the log has the details under this id."""
    message = f"internal error {error_id}; the server's log says more under this name"
    return ApiError(500, message, code="internal_error")


def of_validation(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """Return the answer to a body that does not fit the schema; it repeats no values.

    Args:
        errors: Errors of pydantic, not empty. Only the first few different errors are used.
    """
    said: dict[str, Mapping[str, Any]] = {}
    for error in errors:
        said.setdefault(_sentence(error), error)
        if len(said) > MOST_SHOWN:
            break
    first, *_ = said.values()
    is_unknown = any(error["type"] == "extra_forbidden" for error in said.values())
    more = "; and more" if len(said) > MOST_SHOWN else ""
    text = "; ".join(islice(said, MOST_SHOWN)) + more
    return refused(
        text, _clipped(_where(first)) or None, "unknown_parameter" if is_unknown else None
    )


def _sentence(error: Mapping[str, Any]) -> str:
    where, kind = _where(error), str(error["type"])
    if kind == "extra_forbidden":
        name = str(error["loc"][-1])
        is_short = len(name) <= _LONGEST_NAME
        near = difflib.get_close_matches(name, FIELD_NAMES, n=1) if is_short else []
        if name in near:
            return f"unknown field {where!r}: it belongs to another endpoint or another object"
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown field {_clipped(where)!r}{hint}"
    if kind == "missing":
        return f"{where}: required"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not where and kind.startswith(("model_attributes", "dict", "model")):
        message = "the body must be a JSON object, sent with content-type application/json"
    return f"{where}: {message}" if where else message


def _where(error: Mapping[str, Any]) -> str:
    """Return the field as a client writes it, such as `messages.0.content`."""
    *outer, last = error["loc"] or [""]
    is_unknown = error["type"] == "extra_forbidden"
    kept = [part for part in outer if isinstance(part, int) or part in FIELD_NAMES]
    kept += [last] if is_unknown or isinstance(last, int) or last in FIELD_NAMES else []
    return ".".join(map(str, kept))


def _clipped(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
