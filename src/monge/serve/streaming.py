"""Answers as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from monge.serve.answers import Answers
from monge.serve.errors import ApiError
from monge.serve.generation import Event, Summary
from monge.serve.request_handle import RequestHandle

DONE: Final = "data: [DONE]\n\n"


async def stream(answers: Answers, handles: Sequence[RequestHandle]) -> AsyncIterator[str]:
    """Yield the chunks of all choices as they arrive, then usage if requested, then the end.

    An error after the first chunk is an event with an `error` object, because the status is already
    sent. When the stream ends, its generations end too.
    """
    started, summaries, num_generated = set[int](), dict[int, Summary](), 0
    request = answers.request
    try:
        for chunk in answers.opening():
            yield _event(chunk)
        async with aclosing(_merged(handles)) as events:
            async for index, event in events:
                chunk = answers.chunk(index, event, is_first=index not in started)
                started.add(index)
                num_generated += len(event.token_ids)
                if event.summary is not None:
                    summaries[index] = event.summary
                if chunk is not None:
                    running = {"usage": answers.usage_of(num_generated)} if request.has_running_usage else {}
                    yield _event(chunk | running)
        if request.has_usage:
            yield _event(answers.last([summaries[index] for index in sorted(summaries)]))
    except ApiError as error:
        yield _event(error.body())
    finally:
        for handle in handles:
            handle.cancel()
    yield DONE


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
    return f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
