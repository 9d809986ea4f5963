"""Continuous batching: generations join and leave the rounds of one decoding thread."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

from monge.core.errors import ContextLengthError, OptionError, OutOfStepError
from monge.engine.batch import Batch
from monge.engine.decoder import Decoder
from monge.engine.garbage import trim_heap
from monge.engine.session import Session, catch
from monge.engine.threads import release_openmp_pool
from monge.serve.controller_names import ControllerNames
from monge.serve.generation import (
    GenerationFinish,
    GenerationRequest,
    Measure,
    QueueFullError,
    SchedulerClosedError,
    Sink,
    Snapshot,
)
from monge.serve.kv_budget import KVBudget
from monge.serve.request_handle import RequestHandle
from monge.serve.scheduled_generation import ScheduledGeneration, request_of
from monge.serve.speculation_counter import SpeculationCounter, Totals

_UNBOUNDED_CONTEXT: Final = 32768
"""Tokens per row of the default budget, if the target has no limit."""
_QUIET_S: Final = 1.0
"""Idle seconds after which free memory is returned to the system."""

_PIECE_S: Final = 0.25
"""Seconds that running requests wait for a chunk of new prompts."""


def no_sink(measure: Measure, value: float | int) -> None:
    """Ignore the observation."""


class Scheduler:
    """Decodes generations in one thread, which is the only thread that runs the networks.

    Between two rounds, three things happen. Generations that ended, were cancelled or passed their
    deadline leave. Waiting generations join, first come, first served, if the batch and the caches
    have room for their longest completion. One chunk of the new prompts is read.

    An error of one generation (in a processor, in the drafter, or NaN logits) ends only that
    generation. The others get the text that they would get alone, unless the controller depends on
    the batch or on clocks.

    No other code may use the decoder while the scheduler runs.

    Args:
        decoder: The parts, the tokenizer.
        max_batch_size: Generations decoded together; `None` takes the value of the decoder.
        max_waiting: Client requests that may wait, wholly or partly.
        kv_budget_tokens: Tokens in the caches: rows x longest row. `None` lets each row of a full
            batch fill the context of the target.
        prefill_chunk: Prompt tokens that are read between two rounds; fewer if running requests
            would wait more than a quarter of a second.
        sink: Receives every observation.

    Raises:
        OptionError: If a limit is too small for any request.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_batch_size: int | None = None,
        max_waiting: int = 256,
        kv_budget_tokens: int | None = None,
        prefill_chunk: int = 512,
        sink: Sink = no_sink,
    ) -> None:
        self._decoder, self._sink, self._prefill_chunk = decoder, sink, prefill_chunk
        self._max_batch_size = decoder.max_batch_size if max_batch_size is None else max_batch_size
        self.max_waiting = max_waiting
        row = decoder.components.target.max_length or _UNBOUNDED_CONTEXT
        self._kv_budget = KVBudget(
            self._max_batch_size * row if kv_budget_tokens is None else kv_budget_tokens
        )
        for name, value in (("max_batch_size", self._max_batch_size), ("max_waiting", max_waiting)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1; got {value}")
        if self._kv_budget.total < 2:
            raise OptionError(
                "kv_budget_tokens must hold a prompt and a token, at least 2; got "
                f"{kv_budget_tokens}"
            )
        self._max_depth = decoder.components.drafter.capabilities.max_depth
        self._changed = threading.Condition()
        self._waiting: deque[ScheduledGeneration] = deque()
        self._running: dict[int, ScheduledGeneration] = {}
        self._cancelled: set[int] = set()
        self._group_ids = count()
        self._is_open, self._failure = True, None
        self._controller_names = ControllerNames(decoder.components)
        self._totals = Totals(self._max_depth, self._controller_names.names)
        self._batch = self._new_batch()
        self._thread = threading.Thread(target=self._run, name="monge-decoding", daemon=True)

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def start(self) -> None:
        """Start the decoding thread; generations that were submitted before are decoded too."""
        release_openmp_pool()  # of the thread that loaded the models
        self._thread.start()

    def submit(self, generation: GenerationRequest) -> RequestHandle:
        """Queue one generation as its own request. Any thread may call this.

        Raises:
            SchedulerClosedError: If the scheduler is closed.
            QueueFullError: If too many requests wait.
            ContextLengthError: If the generation cannot fit the context of a model or the caches.
            OptionError: If it cannot be honoured.
        """
        (handle,) = self.submit_all([generation])
        return handle

    def submit_all(
        self, generations: Sequence[GenerationRequest], *, arrived: float | None = None
    ) -> list[RequestHandle]:
        """Queue the generations of one client request, all or none. Any thread may call this.

        Args:
            generations: The generations.
            arrived: Arrival of the request on the clock of `time.perf_counter`, from which
                deadlines and queue times count; `None` for now.

        Raises:
            SchedulerClosedError, QueueFullError, ContextLengthError, OptionError: As `submit`.
        """
        with self._changed:  # before any session is made
            self._check_queue()
            group_id = next(self._group_ids)
        submitted_at = time.perf_counter() if arrived is None else arrived
        entries = [self._entry(generation, group_id, submitted_at) for generation in generations]
        with self._changed:
            self._check_queue()
            self._waiting.extend(entries)
            self._changed.notify_all()
        return [entry.handle for entry in entries]

    def snapshot(self) -> Snapshot:
        """Return the present state. Any thread may call this."""
        with self._changed:
            num_prefilling = self._batch.num_prefilling
            return Snapshot(
                num_running=len(self._running) - num_prefilling,
                num_prefilling=num_prefilling,
                num_waiting=len(self._waiting),
                kv_used_tokens=self._kv_budget.used,
                kv_budget_tokens=self._kv_budget.total,
                is_open=self._is_open,
                failure=self._failure,
                num_prompt_tokens=self._totals.num_prompt_tokens,
                num_generated_tokens=self._totals.num_generated_tokens,
                finished=dict(self._totals.finished),
                speculation=self._totals.speculation.total(),
                by_controller={
                    name: counter.total() for name, counter in self._totals.by_controller.items()
                },
            )

    def close(self, *, drain: bool = True, timeout_s: float | int | None = None) -> None:
        """Accept no more generations and end the thread.

        Args:
            drain: Whether waiting and running generations are finished first; else they are
                cancelled.
            timeout_s: Seconds until the remaining generations are cancelled; `None` for no limit.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if drain and self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._changed:
            self._cancelled.update(
                entry.handle.request_id for entry in (*self._waiting, *self._running.values())
            )
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._sweep()

    def _entry(
        self, generation: GenerationRequest, group_id: int, submitted_at: float
    ) -> ScheduledGeneration:
        if generation.num_reserved_tokens > self._kv_budget.total:
            raise ContextLengthError(
                f"prompt of {len(generation.prompt_ids)} tokens + "
                f"max_new_tokens={generation.max_new_tokens} = "
                f"{generation.num_reserved_tokens} exceeds the {self._kv_budget.total} tokens of "
                "all caches together; "
                "shorten the prompt or ask for fewer tokens"
            )
        session = self._decoder.session(
            request_of(generation), keeps_records=generation.recording is not None
        )
        request_id = session.context.request_id
        return ScheduledGeneration(
            generation=generation,
            group_id=group_id,
            session=session,
            handle=RequestHandle(request_id, lambda: self._cancel(request_id)),
            counter=SpeculationCounter(self._max_depth),
            controller=self._controller_names.of(generation),
            sink=self._sink,
            submitted_at=submitted_at,
        )

    def _check_queue(self) -> None:
        """Refuse a request if the queue is full or closed; the caller holds the lock."""
        if not self._is_open:
            raise SchedulerClosedError(
                f"no more generations are taken: {self._failure or 'the scheduler is closing'}"
            )
        num_waiting = len({entry.group_id for entry in self._waiting})
        if num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests are waiting, as many as may; try again later"
            )

    def _cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def _new_batch(self) -> Batch:
        return Batch(
            self._decoder.components,
            prefill_chunk=self._prefill_chunk,
            piece_s=_PIECE_S,
            isolated=True,
        )

    def _run(self) -> None:
        error = catch(self._decode)
        if error is not None:
            with self._changed:
                self._is_open, self._failure = False, f"{type(error).__name__}: {error}"
                left = [*self._running.values(), *self._waiting]
                self._waiting.clear()
            for entry in left:
                entry.sink = no_sink  # the sink may be the cause
                self._end(entry, "error", error)

    def _decode(self) -> None:
        while self._has_work():
            self._sweep()
            self._admit()
            if len(self._batch):
                self._round()

    def _has_work(self) -> bool:
        with self._changed:
            is_quiet = not self._changed.wait_for(self._is_called, _QUIET_S)
        if is_quiet:
            trim_heap()  # outside of the lock, so that new clients do not wait for it
        with self._changed:
            self._changed.wait_for(self._is_called)
            return bool(self._waiting or self._running)

    def _is_called(self) -> bool:
        return bool(self._waiting or self._running or not self._is_open)

    def _sweep(self) -> None:
        """End generations that were cancelled, passed their deadline, or have too large a record."""
        now = time.perf_counter()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            known = [*self._waiting, *self._running.values()]
            leaving: list[tuple[ScheduledGeneration, GenerationFinish]] = []
            for entry in known:
                if entry.handle.request_id in cancelled:
                    leaving.append((entry, "cancelled"))
                elif entry.is_late(now):
                    leaving.append((entry, "deadline"))
                elif entry.is_oversized:
                    leaving.append((entry, "oversized"))
            gone = {entry.handle.request_id for entry, _ in leaving}
            self._waiting = deque(
                entry for entry in self._waiting if entry.handle.request_id not in gone
            )
        for entry, reason in leaving:
            if entry.handle.request_id in self._running:
                self._batch.leave(entry.session)
            self._end(entry, reason)

    def _admit(self) -> None:
        """Admit generations in queue order while they fit."""
        while entry := self._next():
            entry.admitted_at = time.perf_counter()
            error = catch(lambda session=entry.session: self._batch.join([session]))
            if isinstance(error, OutOfStepError):
                raise error
            if error is not None:
                self._end(entry, "error", error)

    def _next(self) -> ScheduledGeneration | None:
        with self._changed:
            if not self._waiting or len(self._running) >= self._max_batch_size:
                return None
            entry = self._waiting[0]
            if not self._kv_budget.fits(entry.generation.num_reserved_tokens):
                return None
            self._waiting.popleft()
            self._running[entry.handle.request_id] = entry
            self._kv_budget.reserve(entry.handle.request_id, entry.generation.num_reserved_tokens)
            return entry

    def _round(self) -> None:
        before, served = self._batch.num_prompt_tokens, list[Session]()
        error = catch(lambda: served.extend(self._batch.step(num_waiting=len(self._waiting))))
        for one in (error, *(session.error for session in served)):
            if isinstance(one, OutOfStepError):
                raise one  # no later round can succeed
        if error is not None:
            self._start_over(error)
            return
        num_tokens = self._batch.num_prompt_tokens - before
        for session in served:
            num_tokens += self._publish(self._running[session.context.request_id])
        self._sink("round_tokens", num_tokens)

    def _publish(self, entry: ScheduledGeneration) -> int:
        """Send the new tokens of a generation, and return their number."""
        is_first = entry.num_sent == 0
        event, record = entry.advance()
        with self._changed:
            self._totals.num_generated_tokens += len(event.token_ids)
            if is_first and event.token_ids:
                self._totals.num_prompt_tokens += len(entry.generation.prompt_ids)
            if record is not None:
                self._totals.add(record, entry.controller)
        if event.finish_reason is not None:
            self._forget(entry, event.finish_reason)
        # Last, so that a client that reads the end finds the generation counted.
        entry.handle.put(event)
        return len(event.token_ids)

    def _start_over(self, error: Exception) -> None:
        """End all generations of a failed round; waiting ones get a new batch."""
        batch, self._batch = self._batch, self._new_batch()
        for entry in list(self._running.values()):
            self._end(entry, "error", error)
        batch.close()

    def _end(
        self, entry: ScheduledGeneration, reason: GenerationFinish, error: Exception | None = None
    ) -> None:
        event = entry.end(reason, error)
        self._forget(entry, reason)
        entry.handle.put(event)

    def _forget(self, entry: ScheduledGeneration, reason: GenerationFinish) -> None:
        with self._changed:
            self._running.pop(entry.handle.request_id, None)
            self._kv_budget.release(entry.handle.request_id)
            self._totals.finished[reason] += 1
