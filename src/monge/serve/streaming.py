"""Answers as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from monge.engine.logprobs import TokenLogprob
from monge.serve.answers import Answers
from monge.serve.errors import ApiError
from monge.serve.generation import Event, Summary
from monge.serve.logprobs import dumped
from monge.serve.request_handle import RequestHandle
from monge.serve.request_parser import ParsedRequest
from monge.serve.request_worker import RequestWorker

DONE: Final = "data: [DONE]\n\n"


async def stream(
    answers: Answers, handles: Sequence[RequestHandle], writer: RequestWorker
) -> AsyncIterator[str]:
    """Yield the chunks of all choices as they arrive, then usage if requested, then the end.

    An error after the first chunk is an event with an `error` object, because the status is already
    sent. When the stream ends, its generations end too.

    Args:
        answers: Writes chunks.
        handles: The choices.
        writer: Writes those with log-probabilities, of which there may be many.
    """
    started, summaries, num_generated = set[int](), dict[int, Summary](), 0
    request = answers.request
    try:
        for chunk in answers.opening():
            yield _event(chunk)
        async with (
            aclosing(_merged(handles)) as merged,
            aclosing(_scored(request, merged)) as events,
        ):
            async for index, event in events:
                num_generated += len(event.token_ids)
                if event.summary is not None:
                    summaries[index] = event.summary
                usage = answers.usage_of(num_generated) if request.has_running_usage else None
                write = partial(_chunk, answers, index, event, usage, is_first=index not in started)
                started.add(index)
                has_logprobs = request.generations[index].logprobs is not None
                if chunk := await writer.do(write) if has_logprobs else write():
                    yield chunk
        if request.has_usage:
            yield _event(answers.last([summaries[index] for index in sorted(summaries)]))
    except ApiError as error:
        yield _event(error.body())
    finally:
        for handle in handles:
            handle.cancel()
    yield DONE


def _chunk(
    answers: Answers, index: int, event: Event, usage: dict[str, int] | None, *, is_first: bool
) -> str:
    chunk = answers.chunk(index, event, is_first=is_first)
    return "" if chunk is None else _event(chunk | ({} if usage is None else {"usage": usage}))


async def _scored(
    request: ParsedRequest, events: AsyncIterator[tuple[int, Event]]
) -> AsyncGenerator[tuple[int, Event]]:
    """Give each choice the scores of its prompt; they come with its first choice, and others wait for that."""
    scores, held = (
        dict[int, tuple[TokenLogprob, ...] | None](),
        dict[int, list[tuple[int, Event]]](),
    )
    begun = set[int]()
    async for index, event in events:
        first = request.first_choice(index)
        ready = [(index, event)]
        if index == first and first not in scores:
            scores[first] = event.prompt_logprobs
            ready += held.pop(first, [])
        elif first not in scores and request.generations[first].prompt_logprobs is not None:
            held.setdefault(first, []).append((index, event))
            continue
        for one, its in ready:
            is_scored = one in begun or one == first or first not in scores
            begun.add(one)
            yield one, its if is_scored else replace(its, prompt_logprobs=scores[first])


async def _merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Event]]:
    """Yield the events of several generations with their index, in order of arrival."""
    arrived = asyncio.Queue[tuple[int, Event] | None]()

    async def forward(index: int, handle: RequestHandle) -> None:
        async for event in handle:
            arrived.put_nowait((index, event))
        arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(index, handle)) for index, handle in enumerate(handles)]
    try:
        for _ in tasks:
            while (item := await arrived.get()) is not None:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {dumped(chunk)}\n\n"
