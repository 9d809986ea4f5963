"""Threads that read bodies and write answers, so that the event loop is not blocked."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Final, TypeVar

from fastapi import Request

from monge.serve.api.errors import ApiError, failure
from monge.serve.scheduling.generation import QueueFullError

Result = TypeVar("Result")
_STUCK_S: Final = 10.0
"""Seconds after which a piece of work hangs."""


def run_in_daemon(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run a function in a new thread, for which the interpreter does not wait when it ends."""
    future = Future[Result]()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  for the caller
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


class RequestWorker:
    """Runs functions in a single thread, in order of arrival.

    A single thread, since tokenizers are not thread-safe, and since the event loop then waits for
    at most one C call that holds the interpreter lock.

    Args:
        name: Of the thread.
        max_waiting: Functions that may wait or run; `None` for no limit.
    """

    def __init__(self, name: str, max_waiting: int | None = None) -> None:
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._name, self._turn, self._began = name, asyncio.Semaphore(1), 0.0

    @property
    def is_stuck(self) -> bool:
        """True while the thread runs a function for longer than any should take."""
        return self._turn.locked() and time.monotonic() - self._began > _STUCK_S

    async def do(self, work: Callable[[], Result]) -> Result:
        """Return the result of the work; a caller that is cancelled early drops it.

        Raises:
            QueueFullError: If too many pieces wait.
        """
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise QueueFullError(self._max_waiting)
        loop = asyncio.get_running_loop()

        def end_turn(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, so that nobody waits
                loop.call_soon_threadsafe(self._turn.release)

        self._num_waiting += 1
        try:
            await self._turn.acquire()
            self._began = time.monotonic()
            future = run_in_daemon(work, self._name)
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
        ApiError: If the client disconnects, the time is over, or the work is cancelled.
    """
    left = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({work, left}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.cancelled():
            raise failure("cancelled", "")
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
