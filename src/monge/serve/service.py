"""The endpoints."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from monge.engine.decoder import Decoder
from monge.serve.answers import Answers
from monge.serve.chat import ChatFormat
from monge.serve.errors import ApiError
from monge.serve.jobs import Completion
from monge.serve.metrics import Asked, ServerMetrics
from monge.serve.orders import Order, OrderDesk
from monge.serve.planners import Planners
from monge.serve.scheduler import Scheduler
from monge.serve.schemas import ChatRequest, CompletionRequest, SamplingRequest, SpeculationOptions
from monge.serve.settings import ServerSettings
from monge.serve.streaming import stream
from monge.serve.ticket import Ticket
from monge.serve.token_text import TokenTexts

Body = TypeVar("Body", CompletionRequest, ChatRequest)

_EVENT_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """A stream whose jobs end with it, even if its client left before the first byte."""

    def __init__(self, answers: Answers, tickets: Sequence[Ticket]) -> None:
        super().__init__(stream(answers, tickets), media_type="text/event-stream", headers=_EVENT_HEADERS)
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._tickets)


class Service:
    """What stands behind the endpoints.

    Args:
        decoder: The parts, the tokenizer.
        scheduler: Runs jobs; started and closed with the application.
        settings: What the operator decided.
        metrics: What is measured.
        chat: How conversations are written.
    """

    def __init__(
        self, decoder: Decoder, scheduler: Scheduler, *, settings: ServerSettings, metrics: ServerMetrics, chat: ChatFormat
    ) -> None:
        self._scheduler, self._settings, self._metrics = scheduler, settings, metrics
        lengths = [decoder.parts.target.max_length, decoder.parts.drafter.capabilities.max_length]
        bounds = [scheduler.snapshot().kv_budget_tokens, *(length for length in lengths if length is not None)]
        self._max_job_tokens = min(bounds)
        self._desk = OrderDesk(decoder=decoder, settings=settings, chat=chat, max_job_tokens=self._max_job_tokens)
        self._planners = Planners(decoder.parts)
        self._texts = TokenTexts(decoder.tokenizer)
        self._created = int(time.time())
        self._fingerprint = _fingerprint(decoder)
        # One thread: a tokenizer is no good at being asked by several, and the event loop must not wait for a long text.
        self._clerk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        metrics.watch(scheduler.snapshot)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await self._answer(body, self._desk.of_completion, request)

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await self._answer(body, self._desk.of_chat, request)

    async def models(self) -> dict[str, Any]:
        """The served model, in a list."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """The served model."""
        self._check_model(name)
        return self._card()

    async def health(self) -> Response:
        """200 while requests are taken and served, else 503."""
        now = self._scheduler.snapshot()
        is_well = now.is_open and now.failure is None
        return JSONResponse({"status": "ok" if is_well else "unavailable"}, status_code=200 if is_well else 503)

    async def version(self) -> dict[str, str]:
        """Version of the library."""
        return {"version": version("monge")}

    async def exposition(self) -> Response:
        """Metrics, for Prometheus."""
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, body: Body, understand: Callable[[Body], Order], request: Request) -> Response:
        if body.model is not None:
            self._check_model(body.model)
        order = await asyncio.get_running_loop().run_in_executor(self._clerk, understand, body)
        tickets = self._scheduler.submit_all(order.jobs)
        self._metrics.count_request(_asked(body), self._planners.of(order.jobs[0]))
        answers = Answers(order=order, model_name=self._settings.model_name, fingerprint=self._fingerprint, texts=self._texts)
        if order.is_stream:
            return EventStream(answers, tickets)
        return JSONResponse(answers.whole(await _completions(tickets, request)))

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
            "max_model_len": self._max_job_tokens,
        }


def _asked(body: SamplingRequest) -> Asked:
    if isinstance(body.speculation, SpeculationOptions):
        return "options"
    return "off" if body.speculation is False else "default"


async def _completions(tickets: Sequence[Ticket], request: Request) -> list[Completion]:
    """All completions, unless the client leaves before they are there."""
    work = asyncio.gather(*(ticket.completion_async() for ticket in tickets))
    left = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(499, "the client closed the connection", code="client_left")
    finally:
        left.cancel()
        work.cancel()
        _cancel(tickets)
        # What nobody asks for its error, the event loop reports as lost.
        await asyncio.gather(work, left, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


def _fingerprint(decoder: Decoder) -> str:
    parts = decoder.parts
    names = [f"{name} {version(name)}" for name in ("monge", "torch", "transformers")]
    seeded = parts.planner(parts.seeded).controller
    what = [*names, *map(repr, (parts.target, parts.drafter, parts.rule, parts.controller, seeded))]
    return "monge-" + hashlib.blake2b("\n".join(what).encode(), digest_size=6).hexdigest()
