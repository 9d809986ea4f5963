"""The handle of a submitted generation: its outputs, for threads and for coroutines."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from monge.serve.generation import Output


class RequestHandle:
    """An iterator over the outputs of one generation, also asynchronous, for one reader.

    Outputs are buffered until they are read, at most one per generated token, so a slow reader
    blocks nobody.

    Args:
        request_id: The generation's number.
        on_cancel: Called, from any thread, when the client cancels.
    """

    def __init__(self, request_id: int, on_cancel: Callable[[], None]) -> None:
        self.request_id, self.cancel = request_id, on_cancel
        self._changed = threading.Condition()
        self._outputs: deque[Output] = deque()
        self._is_complete = self._is_ended = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, output: Output) -> None:
        """Add an output; for the scheduler. Those after the last one are dropped."""
        with self._changed:
            if self._is_complete:
                return
            self._is_complete = output.finish_reason is not None
            self._outputs.append(output)
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            # The reader's loop has ended, and the reader with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    def completion(self, timeout_s: float | int | None = None) -> Output:
        """Wait for the end of the generation, and return all outputs in one.

        Raises:
            TimeoutError: If it takes longer than this between two outputs.
        """
        outputs: list[Output] = []
        while not self._is_ended:
            outputs.append(self._next(timeout_s))
        return merged(outputs)

    async def completion_async(self) -> Output:
        """Wait for the end of the generation, and return all outputs in one."""
        return merged([output async for output in self])

    def __iter__(self) -> Iterator[Output]:
        while not self._is_ended:
            yield self._next(None)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while True:
            loop = asyncio.get_running_loop()
            with self._changed:
                if self._is_ended:
                    raise StopAsyncIteration
                if self._outputs:
                    return self._take()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def _next(self, timeout_s: float | int | None) -> Output:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._outputs), timeout_s):
                raise TimeoutError(
                    f"generation {self.request_id}: nothing came for {timeout_s} seconds"
                )
            return self._take()

    def _take(self) -> Output:
        output = self._outputs.popleft()
        self._is_ended = output.finish_reason is not None
        return output


def merged(outputs: Sequence[Output]) -> Output:
    """Merge all outputs of a generation."""
    scores = (one.prompt_logprobs for one in outputs if one.prompt_logprobs is not None)
    return replace(
        outputs[-1],
        text="".join(one.text for one in outputs),
        token_ids=tuple(token for one in outputs for token in one.token_ids),
        logprobs=tuple(entry for one in outputs for entry in one.logprobs),
        prompt_logprobs=next(scores, None),
    )


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():  # a reader that went away has cancelled it
        future.set_result(None)
