"""The application: endpoints, errors and middleware."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from monge.core.errors import MongeError
from monge.engine.decoder import Decoder
from monge.options import ServeOptions
from monge.page.files import FILES, HEADERS, content_of
from monge.serve.api.errors import ApiError, internal, of_monge
from monge.serve.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from monge.serve.http.middleware import IGNORED, REQUEST_ID, BoundedBodies, Gate
from monge.serve.http.service import Service
from monge.serve.observe.metrics import ServerMetrics
from monge.serve.scheduling.scheduler import Scheduler
from monge.serve.settings import KeyRing, checked_options

_LONGEST_PATH: Final = 100
_WATCH_S: Final = 1.0
_CLOSE_S: Final = 5.0
_BODY_TIMEOUT_S: Final = 30
_MAX_BODY_BYTES: Final = 4 * 1024 * 1024
_MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of large bodies that wait to be parsed, of all requests together."""
_MODEL: Final = "#/components/schemas/{model}"
_LOG: Final = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """Message, type, field and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, as the OpenAI API has them."""

    error: ErrorDetail


_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be honoured; the message says why.",
        401: "No valid API key.",
        403: "Sent to a name that is not served.",
        404: "No such model.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        429: "The queue is full, or too many large bodies are being read.",
        500: "An error of the server.",
        503: "The server is shutting down, or has no connection to spare.",
        504: "The request took too long.",
    }.items()
}


_BODIES: Final = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Class of the request body for each path that takes a body."""


class _Described(FastAPI):
    """An application whose description has the bodies that `Service` reads itself."""

    def openapi(self) -> dict[str, Any]:
        """Return the description."""
        if self.openapi_schema is None:
            bodies: list[Any] = [(model, "validation") for model in _BODIES.values()]
            _, models = models_json_schema(bodies, ref_template=_MODEL)
            super().openapi()["components"]["schemas"] |= models["$defs"]
        return super().openapi()


def create_app(
    decoder: Decoder,
    options: ServeOptions,
    *,
    metrics: ServerMetrics | None = None,
) -> FastAPI:
    """Return the OpenAI-compatible application of a decoder; its scheduler starts and ends with it.

    Args:
        decoder: The decoder.
        options: Options of the server. Those of the process, such as `host`, are not read.
        metrics: Metrics of the server; `None` makes new metrics.

    Returns:
        The application. `app.state.snapshot()` returns the state of its scheduler,
        `app.state.leave()` makes it not ready, and `app.state.end_generations()` ends all its
        generations, `app.state.end_reading()` the requests before them; their clients get a 503.

    Raises:
        OptionError: If an option cannot be honoured.
    """
    options = checked_options(options)
    metrics = metrics or ServerMetrics(str(options.served_model_name))
    scheduler = Scheduler(decoder, options, sink=metrics.observe)
    service = Service(decoder, scheduler, options=options, metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        watching = asyncio.create_task(_watch(scheduler))
        yield
        watching.cancel()
        service.trials.close()
        # The connections are gone by now, and what they had asked for is finished or cancelled.
        await asyncio.to_thread(scheduler.close, finish=True, timeout_s=_CLOSE_S)

    app = _Described(
        title="monge",
        version="1",
        summary="OpenAI-compatible",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # they would lead to whatever the Host header says
    )
    app.state.snapshot, app.state.leave = scheduler.snapshot, service.leave
    app.state.end_reading = service.end_reading
    app.state.end_generations = partial(scheduler.close, finish=False)
    _add_routes(app, service)
    for path, (name, kind) in FILES.items():
        app.add_api_route(
            path, partial(_file, name, kind), methods=["GET"], include_in_schema=False
        )
    _add_errors(app)
    # The last one added is the first one asked.
    app.add_middleware(
        BoundedBodies,
        max_bytes=_MAX_BODY_BYTES,
        max_held_bytes=_MAX_HELD_BYTES,
        timeout_s=_BODY_TIMEOUT_S,
    )
    app.add_middleware(
        Gate,
        keys=KeyRing(options),
        hosts=options.allowed_hosts,
        metrics=metrics,
        endpoints=[str(getattr(route, "path", "")) for route in app.routes],
    )
    if options.allowed_origins:  # first, since a preflight brings no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, IGNORED, "retry-after"),
        )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    for path, model in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": _MODEL.format(model=model.__name__)}}}
        app.add_api_route(
            path,
            partial(service.answer, model),
            name=path.removeprefix("/v1").strip("/").replace("/", "_"),
            description=f"Answer `POST {path}`.",
            methods=["POST"],
            responses=_ERRORS,
            response_class=Response,
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
    unwell: Any = {503: {"description": "Not serving."}}
    guarded: Any = {401: _ERRORS[401]}
    for path, endpoint, responses in (
        ("/v1/models", service.models, guarded),
        ("/v1/models/{name:path}", service.model, guarded | {404: _ERRORS[404]}),
        ("/health", service.health, unwell),
        ("/ready", service.ready, unwell),
        ("/version", service.version, None),
        ("/metrics", service.exposition, None),
    ):
        given: Any = {"response_class": Response} if path == "/metrics" else {}
        app.add_api_route(path, endpoint, methods=["GET"], responses=responses, **given)
        if not path.startswith("/v1"):
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, **given)


async def _file(name: str, kind: str) -> Response:
    """Return a file of the page."""
    return Response(content_of(name), media_type=kind, headers=dict(HEADERS))


async def _watch(scheduler: Scheduler) -> None:
    """Look after a decoding thread that may hang, and log when it is in trouble."""
    trouble = None
    while True:
        await asyncio.sleep(_WATCH_S)
        scheduler.check()
        before, trouble = trouble, scheduler.snapshot().failure
        if trouble is not None and before is None:
            _LOG.error("not serving: %s", trouble)
        elif trouble is None and before is not None:
            _LOG.warning("serving again")


def _add_errors(app: FastAPI) -> None:
    """Give every error the same shape. Errors of the server are logged under the request's id."""

    async def expected(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            place = f"{request.method} {request.url.path[:_LONGEST_PATH]}"
            text = f"{place}: {str(error.detail).lower()}"
            error = ApiError(error.status_code, text, headers=error.headers)
        answer = of_monge(error) if isinstance(error, MongeError) else error
        if not isinstance(answer, ApiError):
            raise error
        request.state.error_code = answer.code
        return answer.response()

    async def unexpected(request: Request, error: Exception) -> Response:
        name = request.state.request_id
        _LOG.error("internal error %s at %s", name, request.url.path, exc_info=error)
        answer = internal(name)
        answer.headers[REQUEST_ID] = name
        return answer.response()

    for kind in (ApiError, HTTPException, MongeError):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(Exception, unexpected)
