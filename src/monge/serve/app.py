"""The application: endpoints, errors, and what stands before them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from monge.core.errors import MongeError
from monge.engine.chat_format import ChatFormat
from monge.engine.decoder import Decoder
from monge.serve.errors import ApiError, internal, of_monge
from monge.serve.metrics import ServerMetrics
from monge.serve.records import Recorder
from monge.serve.scheduler import Scheduler
from monge.serve.schemas import ChatRequest, CompletionRequest
from monge.serve.security import AllowedHosts, ApiKeyGate, BoundedBodies, CountedAnswers
from monge.serve.service import Service
from monge.serve.settings import ServerSettings

_LONGEST_PATH: Final = 100
_WATCH_S: Final = 1.0
_CLOSE_S: Final = 5.0
_MODEL: Final = "#/components/schemas/{model}"
_LOG: Final = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong."""

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


class _Described(FastAPI):
    """An application whose description has the bodies that `Service` reads itself."""

    def openapi(self) -> dict[str, Any]:
        """The description."""
        if self.openapi_schema is None:
            described = super().openapi()
            _, models = models_json_schema(
                [(CompletionRequest, "validation"), (ChatRequest, "validation")],
                ref_template=_MODEL,
            )
            described["components"]["schemas"] |= models["$defs"]
        return super().openapi()


def create_app(
    decoder: Decoder,
    settings: ServerSettings,
    chat: ChatFormat,
    *,
    metrics: ServerMetrics | None = None,
    recorder: Recorder | None = None,
    **scheduling: Any,
) -> FastAPI:
    """The OpenAI-compatible application over one decoder; its scheduler starts and ends with it.

    Args:
        decoder: What decodes.
        settings: What the operator decided.
        chat: How conversations are written.
        metrics: What is measured; `None` for those of one server.
        recorder: Records requests that ask for it, and decodes all requests in place of `decoder`;
            `None` refuses them.
        **scheduling: Options of `Scheduler`.

    Returns:
        The application. `app.state.snapshot()` returns the state of its scheduler,
        `app.state.leave()` makes it not ready, and `app.state.end_generations()` ends all its
        generations; their clients get a 503.
    """
    metrics = metrics or ServerMetrics(settings.model_name)
    decoder = decoder if recorder is None else recorder.decoder
    scheduler = Scheduler(decoder, sink=metrics.observe, **scheduling)
    service = Service(
        decoder, scheduler, settings=settings, metrics=metrics, chat=chat, recorder=recorder
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        watching = asyncio.create_task(_watch(scheduler))
        yield
        watching.cancel()
        # The connections are gone by now, and what they had asked for is finished or cancelled.
        await asyncio.to_thread(scheduler.close, drain=True, timeout_s=_CLOSE_S)

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
    app.state.end_generations = partial(scheduler.close, drain=False)
    _add_routes(app, service)
    _add_errors(app, metrics)
    # The last one added is the first one asked.
    app.add_middleware(
        BoundedBodies,
        max_bytes=settings.max_request_bytes,
        max_held_bytes=settings.max_held_bytes,
        timeout_s=settings.body_timeout_s,
    )
    app.add_middleware(ApiKeyGate, keys=settings.api_keys)
    app.add_middleware(AllowedHosts, hosts=settings.allowed_hosts)
    app.add_middleware(
        CountedAnswers,
        count=metrics.count_answer,
        endpoints=[str(getattr(route, "path", "")) for route in app.routes],
    )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    for path, endpoint, model in (
        ("/v1/completions", service.completions, CompletionRequest),
        ("/v1/chat/completions", service.chat_completions, ChatRequest),
    ):
        content = {"application/json": {"schema": {"$ref": _MODEL.format(model=model.__name__)}}}
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            responses=_ERRORS,
            response_class=Response,
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
    app.add_api_route("/v1/models", service.models, methods=["GET"], responses={401: _ERRORS[401]})
    app.add_api_route(
        "/v1/models/{name:path}",
        service.model,
        methods=["GET"],
        responses={status: _ERRORS[status] for status in (401, 404)},
    )
    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "Not serving."}}
    for path, probe, responses in (
        ("/health", service.health, unwell),
        ("/ready", service.ready, unwell),
        ("/version", service.version, None),
        ("/metrics", service.exposition, None),
    ):
        given: Any = {"response_class": Response} if probe == service.exposition else {}
        app.add_api_route(path, probe, methods=["GET"], responses=responses, **given)
        app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False, **given)


async def _watch(scheduler: Scheduler) -> None:
    """Look after a decoding thread that may hang, and say when it is in trouble."""
    trouble = None
    while True:
        await asyncio.sleep(_WATCH_S)
        scheduler.check()
        before, trouble = trouble, scheduler.snapshot().failure
        if trouble is not None and before is None:
            _LOG.error("not serving: %s", trouble)
        elif trouble is None and before is not None:
            _LOG.warning("serving again")


def _add_errors(app: FastAPI, metrics: ServerMetrics) -> None:
    """Every error in one shape; what is not the client's fault gets an id, under which the log says what it was."""

    def answer(request: Request, error: ApiError) -> Response:
        request.state.error_code = error.code
        return error.response()

    async def of_api(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    async def of_http(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path[:_LONGEST_PATH]}: {str(error.detail).lower()}"
        return answer(request, ApiError(error.status_code, text, headers=error.headers))

    async def of_library(request: Request, error: MongeError) -> Response:
        told = of_monge(error)
        if told is None:
            raise error
        return answer(request, told)

    async def of_ours(request: Request, error: Exception) -> Response:
        error_id = secrets.token_hex(8)
        _LOG.error("internal error %s at %s", error_id, request.url.path, exc_info=error)
        metrics.count_answer(request.url.path, 500, "internal_error")
        return internal(error_id).response()

    handlers: dict[type[Exception], Any] = {
        ApiError: of_api,
        HTTPException: of_http,
        MongeError: of_library,
        Exception: of_ours,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
