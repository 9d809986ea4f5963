"""Outputs of all choices of a request, in order of arrival, and answers as server-sent events."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from monge.requests.logprobs import TokenLogprob
from monge.serve.api.answers import Answers, dumped
from monge.serve.api.errors import ApiError
from monge.serve.api.request_parser import ParsedRequest
from monge.serve.api.request_worker import RequestWorker
from monge.serve.api.schemas import StreamOptions
from monge.serve.scheduling.generation import Output
from monge.serve.scheduling.scheduler import Scheduler

DONE: Final = "data: [DONE]\n\n"
_SILENT_S: Final = 15.0
"""Seconds after which a stream that waits has a comment."""
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Outputs:
    """Submits a request, and iterates over the outputs of its choices with their index.

    Outputs are buffered until they are read, at most one per generated token, so a slow reader does
    not block other requests.

    Args:
        request: The request.
        scheduler: Decodes it.
        **options: Of `Scheduler.submit`.
    """

    def __init__(self, request: ParsedRequest, scheduler: Scheduler, **options: Any) -> None:
        self._request, self._scheduler = request, scheduler
        self._arrived = asyncio.Queue[tuple[int, Output]]()
        loop = asyncio.get_running_loop()

        def put(index: int, output: Output) -> None:
            with suppress(RuntimeError):  # the loop has ended, and the reader with it
                loop.call_soon_threadsafe(self._arrived.put_nowait, (index, output))

        self._ids = scheduler.submit(request.choices, put, **options)
        self.figures = dict[str, Any]()
        """Tokens and times of what was read so far, for the log."""

    def cancel(self) -> None:
        """End the choices that have not ended."""
        self._scheduler.cancel(self._ids)

    async def whole(self) -> list[Output]:
        """Return all outputs of each choice, joined into a single output."""
        parts: list[list[Output]] = [[] for _ in self._ids]
        async for index, output in self:
            parts[index].append(output)
        return list(map(merged, parts))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield outputs as they arrive.

        The scores of a prompt come with its first choice, and the other choices wait for them.
        """
        scores = dict[int, tuple[TokenLogprob, ...] | None]()
        held, begun, num_left = defaultdict[int, list[Any]](list), set[int](), len(self._ids)
        while num_left:
            index, output = await self._arrived.get()
            num_left -= output.finish_reason is not None
            self._note(output)
            first = self._request.first_choice(index)
            if index == first or self._request.choices[first].prompt_logprobs is None:
                scores.setdefault(first, output.prompt_logprobs)
            held[first].append((index, output))
            if first in scores:
                for one, its in held.pop(first):
                    yield one, its if one in begun else replace(its, prompt_logprobs=scores[first])
                    begun.add(one)

    def _note(self, output: Output) -> None:
        now, summary = self.figures, output.summary
        num_new = 0 if self._request.hides_completion else len(output.token_ids)
        now["completion_tokens"] = now.get("completion_tokens", 0) + num_new
        if summary is not None:
            now["finish_reason"] = output.finish_reason
            for name in ("queue_s", "first_token_s"):
                now[name] = max(now.get(name, 0.0), round(getattr(summary, name), 4))


def merged(outputs: Sequence[Output]) -> Output:
    """Merge all outputs of a generation."""
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        records=tuple(record for output in outputs for record in output.records),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


class EventStream(StreamingResponse):
    """A stream that cancels its generations when it ends or its client disconnects.

    `writer` writes chunks with log-probabilities or trees, of which there may be many.
    """

    def __init__(self, answers: Answers, outputs: Outputs, writer: RequestWorker) -> None:
        events = _kept_alive(_events(answers, outputs, writer))
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._outputs.cancel()


async def _kept_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events, and a comment whenever none came for a while: proxies cut silent connections."""
    event: asyncio.Future[str] | None = None
    try:
        while True:
            event = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({event}, timeout=_SILENT_S))[0]:
                yield ": waiting\n\n"
            yield event.result()
    except StopAsyncIteration:
        pass
    finally:
        if event is not None:
            event.cancel()


async def _events(answers: Answers, outputs: Outputs, writer: RequestWorker) -> AsyncIterator[str]:
    """Yield the chunks of all choices as they arrive, then usage if requested, then the end.

    An error after the first chunk is an event with an `error` object, because the status is already
    sent.
    """
    begun, last, num_generated = set[int](), dict[int, Output](), 0
    request = answers.request
    wanted = request.body.stream_options or StreamOptions()
    try:
        for chunk in answers.opening():
            yield _event(chunk)
        async for index, output in outputs:
            num_generated += len(output.token_ids)
            last[index] = output
            usage = answers.usage(num_generated) if wanted.continuous_usage_stats else None
            write = partial(_chunks, answers, index, output, usage, is_first=index not in begun)
            begun.add(index)
            is_large = request.choices[index].logprobs is not None or request.body.trace
            if chunk := await writer.do(write) if is_large else write():
                yield chunk
        for chunk in answers.closing([last[index] for index in sorted(last)]):
            yield _event(chunk)
    except ApiError as error:
        yield _event(answers.failed(error))
    yield DONE


def _chunks(
    answers: Answers, index: int, output: Output, usage: dict[str, Any] | None, *, is_first: bool
) -> str:
    more = {} if usage is None else {"usage": usage}
    chunks = answers.chunks(index, output, is_first=is_first)
    return "".join(_event(chunk | more) for chunk in chunks)


def _event(chunk: dict[str, Any]) -> str:
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {dumped(chunk)}\n\n"
