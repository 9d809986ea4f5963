"""The handle of a submitted generation: its events, for threads and for coroutines."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from monge.serve.generation import Completion, Event


class RequestHandle:
    """An iterator over the events of one generation, also asynchronous, for one reader.

    Events are buffered until they are read, at most one per generated token, so a slow reader
    blocks nobody.

    Args:
        request_id: The generation's number.
        on_cancel: Called, from any thread, when the client cancels.
    """

    def __init__(self, request_id: int, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._is_complete = self._is_ended = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, event: Event) -> None:
        """Add an event; for the scheduler. What comes after the last one is dropped."""
        with self._changed:
            if self._is_complete:
                return
            self._is_complete = event.finish_reason is not None
            self._events.append(event)
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            # The reader's loop has ended, and the reader with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    def cancel(self) -> None:
        """Cancel the generation: it ends between two rounds, with a last event `cancelled`."""
        self._on_cancel()

    def completion(self, timeout_s: float | int | None = None) -> Completion:
        """Wait for the end of the generation.

        Raises:
            TimeoutError: If it takes longer than this between two events.
        """
        events: list[Event] = []
        while not self._is_ended:
            events.append(self._next(timeout_s))
        return gather(events)

    async def completion_async(self) -> Completion:
        """Wait for the end of the generation."""
        return gather([event async for event in self])

    def __iter__(self) -> Iterator[Event]:
        while not self._is_ended:
            yield self._next(None)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            loop = asyncio.get_running_loop()
            with self._changed:
                if self._is_ended:
                    raise StopAsyncIteration
                if self._events:
                    return self._take()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def _next(self, timeout_s: float | int | None) -> Event:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._events), timeout_s):
                raise TimeoutError(
                    f"generation {self.request_id}: nothing came for {timeout_s} seconds"
                )
            return self._take()

    def _take(self) -> Event:
        event = self._events.popleft()
        self._is_ended = event.finish_reason is not None
        return event


def gather(events: Iterable[Event]) -> Completion:
    """Merge all events of a generation."""
    every = list(events)
    last = every[-1]
    assert last.finish_reason is not None and last.summary is not None, "the last event is missing"
    return Completion(
        text="".join(event.text for event in every),
        token_ids=tuple(token for event in every for token in event.token_ids),
        logprobs=tuple(entry for event in every for entry in event.logprobs),
        prompt_logprobs=next(
            (event.prompt_logprobs for event in every if event.prompt_logprobs is not None), None
        ),
        finish_reason=last.finish_reason,
        summary=last.summary,
        recorded=last.recorded,
    )


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():  # a reader that went away has cancelled it
        future.set_result(None)
