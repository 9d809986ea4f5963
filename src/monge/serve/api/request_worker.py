"""Threads that read bodies and write answers, so that the event loop is not blocked."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from fastapi import Request

from monge.serve.api.errors import ApiError, failure
from monge.serve.scheduling.generation import QueueFullError

Result = TypeVar("Result")


class RequestWorker:
    """Runs one piece of work at a time in its own thread, in order of arrival.

    There is one thread because tokenizers are not thread-safe, and because the event loop then
    waits for at most one C call that holds the interpreter lock.

    Args:
        name: Of the thread.
        max_waiting: Pieces that may wait or run; `None` for no limit.
    """

    def __init__(self, name: str, max_waiting: int | None = None) -> None:
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._turn = asyncio.Semaphore(1)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def do(self, work: Callable[[], Result]) -> Result:
        """Return the result of the work; a caller that is cancelled early drops it.

        Raises:
            QueueFullError: If too many pieces wait.
        """
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise QueueFullError(f"The queue is full ({self._max_waiting} requests); retry later.")
        loop = asyncio.get_running_loop()

        def end_turn(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, so that nobody waits
                loop.call_soon_threadsafe(self._turn.release)

        self._num_waiting += 1
        try:
            await self._turn.acquire()
            future = self._thread.submit(work)
            # Only when the thread is done: it does not notice that its caller is cancelled.
            future.add_done_callback(end_turn)
            return await asyncio.wrap_future(future)
        finally:
            self._num_waiting -= 1


async def unless_disconnected(
    request: Request, work: "asyncio.Future[Result]", timeout_s: float | int | None = None
) -> Result:
    """Return the result of the work, unless the client disconnects first.

    Args:
        request: The client's request, whose body has been read.
        work: Cancelled if the client disconnects or the time is over.
        timeout_s: Seconds that the work may take; `None` for no limit.

    Raises:
        ApiError: If the client disconnects, or the time is over.
    """
    left = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({work, left}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if left.done():
            raise ApiError(499, "the client closed the connection", code="client_left")
        raise failure("deadline", "")
    finally:
        left.cancel()
        work.cancel()
        # The event loop reports errors that are never retrieved.
        await asyncio.gather(work, left, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
