"""The endpoints."""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from monge.engine.decoder import Decoder
from monge.options import ServeOptions
from monge.page.trace import drafters_of, origins_of
from monge.requests.text import TokenTexts
from monge.serve.api.answers import Answers, dumped
from monge.serve.api.bodies import check_headers
from monge.serve.api.grammar_trials import GrammarTrials
from monge.serve.api.request_parser import (
    RequestParser,
    UntriedGrammar,
    fields_named,
)
from monge.serve.api.request_worker import RequestWorker, Result, unless_disconnected
from monge.serve.api.responses import ResponseAnswers
from monge.serve.api.schemas import TextRequest, TokensRequest
from monge.serve.api.streaming import EventStream, Outputs
from monge.serve.observe.metrics import ServerMetrics
from monge.serve.scheduling.scheduler import Scheduler, controller_of
from monge.serve.settings import default_sampling


class Service:
    """The endpoints of a server, over the parts of `create_app`."""

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler,
        *,
        options: ServeOptions,
        metrics: ServerMetrics,
    ) -> None:
        self._scheduler, self._options, self._metrics = scheduler, options, metrics
        self._components = decoder.components
        room = scheduler.snapshot().kv_budget_tokens
        longest = min(room, decoder.max_length or room)
        decoder.grammars.prepare()
        self._parser = RequestParser(decoder, options, max_sequence_tokens=longest)
        self._texts, self._fingerprint = TokenTexts(decoder.tokenizer), _fingerprint(decoder)
        self._worker = RequestWorker("monge-requests", options.max_waiting)
        self._writer = RequestWorker("monge-answers")
        self.trials = GrammarTrials(decoder.grammars)
        self._reading = set[asyncio.Future[Any]]()
        self._origins, self._is_leaving = origins_of(self._components.drafter), False
        self._card = {
            "id": options.served_model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "monge",
            "max_model_len": longest,
            "backend": decoder.backend,
            "drafters": drafters_of(self._origins),
            "verifier": self._components.rule.title,
            "default_sampling": default_sampling(options),
        }
        metrics.watch(scheduler.snapshot, decoder.backend)

    async def models(self) -> dict[str, Any]:
        """Return the served model, in a list."""
        return {"object": "list", "data": [self._card]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return the served model."""
        self._parser.check_name(name)
        return self._card

    async def health(self) -> Response:
        """Return 200 while requests are decoded, else 503: a server that stays there needs a restart."""
        return _status(is_well=self._scheduler.snapshot().is_well)

    async def ready(self) -> Response:
        """Return 200 while requests are to be sent here, else 503: also before the server stops."""
        is_stuck = self._worker.is_stuck or self._writer.is_stuck
        is_well = self._scheduler.snapshot().is_well and not is_stuck
        return _status(is_well=is_well and not self._is_leaving)

    def leave(self) -> None:
        """Report that the server is not ready, though requests are served."""
        self._is_leaving = True

    def end_reading(self) -> None:
        """End the requests that are being read or whose grammars are compiled; their clients get a 503."""
        for work in self._reading:
            work.cancel()

    async def version(self) -> dict[str, str]:
        """Return the version of the library."""
        return {"version": version("monge")}

    async def exposition(self) -> Response:
        """Return the metrics, for Prometheus."""
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

    async def answer(self, model: type[TextRequest | TokensRequest], request: Request) -> Response:
        """Answer a request whose body fits the model."""
        arrived = time.perf_counter()
        if issubclass(model, TokensRequest):
            convert = partial(self._parser.convert, model=model)
            return JSONResponse(await self._read(request, convert))
        parse = partial(self._parser.parse, model=model, request_id=request.state.request_id)
        parsed = await self._read(request, parse)
        outputs = Outputs(
            parsed,
            self._scheduler,
            arrived=arrived,
            client=_client(request),
            deadline_s=self._options.request_timeout_s or math.inf,
        )
        request.state.figures.update(prompt_tokens=parsed.num_prompt_tokens)
        outputs.figures = request.state.figures
        controller = controller_of(parsed.choices[0], self._components)
        self._metrics.count_request(parsed.body.asked, controller)
        answers = (Answers if parsed.original is None else ResponseAnswers)(
            request=parsed,
            model_name=str(self._options.served_model_name),
            fingerprint=self._fingerprint,
            texts=self._texts,
            origins=self._origins,
        )
        if parsed.body.stream:
            return EventStream(answers, outputs, self._writer)
        try:
            whole = await unless_disconnected(request, asyncio.ensure_future(outputs.whole()))
            # Many log-probabilities take seconds.
            content = await self._writer.do(lambda: dumped(answers.whole(whole)).encode())
            return Response(content, media_type="application/json")
        finally:
            outputs.cancel()

    async def _read(self, request: Request, parse: Callable[..., Result]) -> Result:
        """Parse the body of a request, which is not held any longer than that, and compile its grammar."""
        check_headers(request.headers)
        try:
            content = request.scope["state"].pop("body")
            ignored = None if self._options.strict else request.state.ignored
            work = partial(parse, content, ignored=ignored)
            while True:  # a grammar may be evicted before it is asked for
                try:
                    return await self._in_time(request, self._worker.do(work))
                except UntriedGrammar as untried:
                    compiled = self.trials.compile(untried.grammar, _client(request))
                    with fields_named(untried.param, grammar=untried.param):
                        await self._in_time(request, compiled)
        finally:
            request.state.release_body()

    async def _in_time(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.ensure_future(work)
        self._reading.add(future)
        future.add_done_callback(self._reading.discard)
        return await unless_disconnected(request, future, self._options.request_timeout_s or None)


def _client(request: Request) -> str:
    return request.state.key or ("" if request.client is None else request.client.host)


def _status(*, is_well: bool) -> Response:
    text = "ok" if is_well else "unavailable"
    return JSONResponse({"status": text}, status_code=200 if is_well else 503)


def _fingerprint(decoder: Decoder) -> str:
    parts = decoder.components
    names = [f"{name} {version(name)}" for name in ("monge", "torch", "transformers")]
    seeded = parts.controller_for(parts.seeded)
    what = [*names, *map(repr, (parts.target, parts.drafter, parts.rule, parts.controller, seeded))]
    return "monge-" + hashlib.blake2b("\n".join(what).encode(), digest_size=6).hexdigest()
