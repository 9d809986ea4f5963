"""The endpoints."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from monge.engine.chat_format import ChatFormat
from monge.engine.decoder import Decoder
from monge.serve.answers import Answers
from monge.serve.bodies import check_headers, parsed
from monge.serve.controller_names import ControllerNames
from monge.serve.errors import ApiError
from monge.serve.generation import Completion
from monge.serve.logprobs import dumped
from monge.serve.metrics import Asked, ServerMetrics
from monge.serve.records import Recorder
from monge.serve.request_handle import RequestHandle
from monge.serve.request_parser import ParsedRequest, RequestParser
from monge.serve.request_worker import RequestWorker, unless_disconnected
from monge.serve.scheduler import Scheduler
from monge.serve.schemas import ChatRequest, CompletionRequest, SamplingRequest, SpeculationOptions
from monge.serve.settings import ServerSettings
from monge.serve.streaming import stream
from monge.serve.token_text import TokenTexts

Body = TypeVar("Body", CompletionRequest, ChatRequest)

_EVENT_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """A stream that cancels its generations when it ends or its client disconnects."""

    def __init__(
        self, answers: Answers, handles: Sequence[RequestHandle], writer: RequestWorker
    ) -> None:
        chunks = stream(answers, handles, writer)
        super().__init__(chunks, media_type="text/event-stream", headers=_EVENT_HEADERS)
        self._handles = handles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._handles)


class Service:
    """The endpoints of a server.

    Args:
        decoder: The parts, the tokenizer.
        scheduler: Runs the generations; the application starts and closes it.
        settings: Settings of the server.
        metrics: Metrics of the server.
        chat: Formats conversations.
        recorder: Records requests that ask for it; `None` refuses them.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        *,
        settings: ServerSettings,
        metrics: ServerMetrics,
        chat: ChatFormat,
        recorder: Recorder | None = None,
    ) -> None:
        self._scheduler, self._settings, self._metrics = scheduler, settings, metrics
        room = scheduler.snapshot().kv_budget_tokens
        self._max_sequence_tokens = min(room, decoder.max_length or room)
        self._parser = RequestParser(
            decoder=decoder,
            settings=settings,
            chat=chat,
            max_sequence_tokens=self._max_sequence_tokens,
            recorder=recorder,
        )
        self._controller_names = ControllerNames(decoder.components)
        self._texts = TokenTexts(decoder.tokenizer)
        self._created = int(time.time())
        self._fingerprint = _fingerprint(decoder)
        self._worker = RequestWorker("monge-requests", scheduler.max_waiting)
        self._writer = RequestWorker("monge-answers")
        self._backend, self._is_leaving = decoder.backend, False
        metrics.watch(scheduler.snapshot)
        metrics.describe(decoder.backend)

    async def completions(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._answer(request, CompletionRequest, self._parser.parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._answer(request, ChatRequest, self._parser.parse_chat)

    async def models(self) -> dict[str, Any]:
        """The served model, in a list."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """The served model."""
        self._check_model(name)
        return self._card()

    async def health(self) -> Response:
        """Return 200 while requests are decoded, else 503: a server that stays there needs a restart."""
        now = self._scheduler.snapshot()
        return _status(is_well=now.is_open and now.failure is None)

    async def ready(self) -> Response:
        """Return 200 while requests are to be sent here, else 503: also before the server stops."""
        now = self._scheduler.snapshot()
        return _status(is_well=now.is_open and now.failure is None and not self._is_leaving)

    def leave(self) -> None:
        """Be ready no more, though requests are served."""
        self._is_leaving = True

    async def version(self) -> dict[str, str]:
        """Version of the library."""
        return {"version": version("monge")}

    async def exposition(self) -> Response:
        """Metrics, for Prometheus."""
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

    async def _answer(
        self, request: Request, model: type[Body], parse: Callable[[Body], ParsedRequest]
    ) -> Response:
        arrived = time.perf_counter()
        parsed_request, asked = await self._parsed(request, model, parse)
        handles = self._scheduler.submit_all(
            parsed_request.generations, arrived=arrived, client=self._client_of(request)
        )
        self._metrics.count_request(asked, self._controller_names.of(parsed_request.generations[0]))
        answers = Answers(
            request=parsed_request,
            model_name=self._settings.model_name,
            fingerprint=self._fingerprint,
            texts=self._texts,
        )
        if parsed_request.is_stream:
            return EventStream(answers, handles, self._writer)
        try:
            work = asyncio.gather(*(handle.completion_async() for handle in handles))
            completions = await unless_disconnected(request, work)
            # Many log-probabilities take seconds, and so does compressing a record.
            content = await self._writer.do(partial(_written, answers, completions))
            return Response(content, media_type="application/json")
        finally:
            _cancel(handles)

    async def _parsed(
        self, request: Request, model: type[Body], parse: Callable[[Body], ParsedRequest]
    ) -> tuple[ParsedRequest, Asked]:
        """Read a request; its body is not held any longer than that."""
        check_headers(request.headers)
        try:
            content = b"".join([part async for part in request.stream()])
            reading = self._worker.do(partial(self._read, content, model, parse))
            return await unless_disconnected(
                request, asyncio.ensure_future(reading), self._settings.request_timeout_s
            )
        finally:
            request.state.release_body()

    def _read(
        self, content: bytes, model: type[Body], parse: Callable[[Body], ParsedRequest]
    ) -> tuple[ParsedRequest, Asked]:
        body = parsed(content, model)
        if body.model is not None:
            self._check_model(body.model)
        return parse(body), _asked(body)

    def _client_of(self, request: Request) -> str:
        """Return the key that a request brings, or else the address that it comes from."""
        address = "" if request.client is None else request.client.host
        return request.headers["authorization"] if self._settings.api_keys else address

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            text = f"this server serves {self._settings.model_name!r} and nothing else; leave `model` out or send that name"
            raise ApiError(404, text, param="model", code="model_not_found")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "monge",
            "max_model_len": self._max_sequence_tokens,
            "backend": self._backend,
        }


def _written(answers: Answers, completions: Sequence[Completion]) -> bytes:
    whole = answers.whole(completions)
    recording = answers.request.generations[0].recording
    if recording is not None:
        sessions = [one.recorded for one in completions if one.recorded is not None]
        whole["certificate"] = recording.recorder.certificate(sessions).document()
    return dumped(whole).encode()


def _status(*, is_well: bool) -> Response:
    text = "ok" if is_well else "unavailable"
    return JSONResponse({"status": text}, status_code=200 if is_well else 503)


def _asked(body: SamplingRequest) -> Asked:
    if isinstance(body.speculation, SpeculationOptions):
        return "options"
    return "off" if body.speculation is False else "default"


def _cancel(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def _fingerprint(decoder: Decoder) -> str:
    parts = decoder.components
    names = [f"{name} {version(name)}" for name in ("monge", "torch", "transformers")]
    seeded = parts.planner(parts.seeded).controller
    what = [*names, *map(repr, (parts.target, parts.drafter, parts.rule, parts.controller, seeded))]
    return "monge-" + hashlib.blake2b("\n".join(what).encode(), digest_size=6).hexdigest()
