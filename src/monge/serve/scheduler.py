"""Continuous batching: generations join and leave the rounds of one decoding thread."""

import heapq
import logging
import math
import threading
import time
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
from monge.serve.waiting import WaitingQueue

_LOG: Final = logging.getLogger(__name__)
_UNBOUNDED_CONTEXT: Final = 32768
"""Tokens per row of the default budget, if the target has no limit."""
_QUIET_S: Final = 1.0
"""Idle seconds after which free memory is returned to the system."""

_PIECE_S: Final = 0.25
"""Seconds that running requests wait for a chunk of new prompts."""

_LATE_S: Final = 2.0
"""Seconds that a round may take beyond the deadline of a generation before it is ended without it."""

_LAST_ROUND_S: Final = 8.0
"""Seconds for the round that runs when the scheduler is closed."""

_MOST_FAILURES: Final = 8
_FAILURES_S: Final = 60.0
"""So many requests in a row that end in errors are a fault of the engine, until none has for so long."""


def no_sink(measure: Measure, value: float | int) -> None:
    """Ignore the observation."""


class Scheduler:
    """Decodes generations in one thread, which is the only thread that runs the networks.

    Between two rounds, three things happen. Generations that ended, were cancelled or passed their
    deadline leave. Waiting generations join if the batch and the caches have room for their longest
    completion; clients take turns. One chunk of the new prompts is read.

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
        round_timeout_s: Seconds after which a round is taken to hang; `None` for never. The
            snapshot then has a failure, until it ends.
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
        round_timeout_s: float | int | None = 120,
        sink: Sink = no_sink,
    ) -> None:
        self._decoder, self._sink, self._prefill_chunk = decoder, sink, prefill_chunk
        self._max_batch_size = decoder.max_batch_size if max_batch_size is None else max_batch_size
        self.max_waiting, self._round_timeout_s = max_waiting, round_timeout_s
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
        self._waiting = WaitingQueue()
        self._running: dict[int, ScheduledGeneration] = {}
        self._leaving: dict[int, GenerationFinish] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._round_began: float | None = None
        self._failed_groups, self._failed_at = set[int](), 0.0
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
        self,
        generations: Sequence[GenerationRequest],
        *,
        arrived: float | None = None,
        client: str = "",
    ) -> list[RequestHandle]:
        """Queue the generations of one client request, all or none. Any thread may call this.

        Args:
            generations: The generations.
            arrived: Arrival of the request on the clock of `time.perf_counter`, from which
                deadlines and queue times count; `None` for now.
            client: Who asks; clients take turns.

        Raises:
            SchedulerClosedError, QueueFullError, ContextLengthError, OptionError: As `submit`.
        """
        with self._changed:  # before any session is made
            self._check_queue()
            group_id = next(self._group_ids)
        submitted_at = time.perf_counter() if arrived is None else arrived
        entries = [self._entry(one, group_id, client, submitted_at) for one in generations]
        with self._changed:
            self._check_queue()
            for entry in entries:
                self._waiting.add(entry)
                if (deadline_s := entry.generation.deadline_s) is not None:
                    deadline = (submitted_at + deadline_s, entry.handle.request_id)
                    heapq.heappush(self._deadlines, deadline)
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
                failure=self._what_fails(),
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
            left = [*self._waiting.entries(), *self._running.values()]
            for entry in left:
                self._leaving.setdefault(entry.handle.request_id, "cancelled")
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_LAST_ROUND_S)
        if not self._thread.is_alive():
            self._sweep()
            return
        _LOG.error("the decoding thread hangs; %d generations are given up", len(left))
        for entry in left:
            entry.handle.put(entry.abandoned("cancelled"))

    def check(self) -> None:
        """End generations whose deadline passed while the decoding thread hangs in a round.

        To be called now and then. Any thread may call this.
        """
        with self._changed:
            late = self._take_late(time.perf_counter() - _LATE_S)
            for request_id in late:
                self._leaving[request_id] = "deadline"
            entries = [self._running.get(one) or self._waiting.get(one) for one in late]
        for entry in filter(None, entries):
            entry.handle.put(entry.abandoned("deadline"))

    def _take_late(self, now: float) -> list[int]:
        """Return the generations whose deadline has passed by then; the caller holds the lock."""
        late: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            late.append(heapq.heappop(self._deadlines)[1])
        return late

    def _what_fails(self) -> str | None:
        """Return why nothing is decoded properly; the caller holds the lock."""
        now, began = time.perf_counter(), self._round_began
        if self._failure is not None:
            return self._failure
        if began is not None and now - began > (self._round_timeout_s or math.inf):
            return f"a round has taken longer than {self._round_timeout_s:g} s"
        if len(self._failed_groups) >= _MOST_FAILURES and now - self._failed_at < _FAILURES_S:
            return f"the last {len(self._failed_groups)} requests all ended in errors"
        return None

    def _entry(
        self, generation: GenerationRequest, group_id: int, client: str, submitted_at: float
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
            client=client,
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
        num_waiting = self._waiting.num_requests
        if num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests are waiting, as many as may; try again later"
            )

    def _cancel(self, request_id: int) -> None:
        with self._changed:
            self._leaving.setdefault(request_id, "cancelled")
            self._changed.notify_all()

    def _new_batch(self) -> Batch:
        return Batch(
            self._decoder.components,
            prefill_chunk=self._prefill_chunk,
            piece_s=_PIECE_S,
            isolated=True,
        )

    def _run(self) -> None:
        error: Exception | None = SystemError("the decoding thread was ended")  # by a SystemExit
        try:
            error = catch(self._decode)
        finally:
            if error is not None:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End all generations with an error, and take no more."""
        _LOG.error("the decoding thread has ended", exc_info=error)
        with self._changed:
            self._is_open, self._failure = False, f"{type(error).__name__}: {error}"
            self._round_began = None
            left = [*self._running.values(), *self._waiting.entries()]
        for entry in left:
            entry.sink = no_sink  # the sink may be the cause
            self._end(entry, "error", error)

    def _decode(self) -> None:
        while self._has_work():
            self._round_began = time.perf_counter()
            self._sweep()
            self._admit()
            if len(self._batch):
                self._round()
            self._round_began = None

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
        with self._changed:
            for request_id in self._take_late(time.perf_counter()):
                self._leaving.setdefault(request_id, "deadline")
            for request_id, one in self._running.items():
                if one.is_oversized:
                    self._leaving.setdefault(request_id, "oversized")
            reasons, self._leaving = self._leaving, {}
            leaving: list[tuple[ScheduledGeneration, GenerationFinish]] = [
                (entry, reason)
                for request_id, reason in reasons.items()
                if (entry := self._running.get(request_id) or self._waiting.discard(request_id))
            ]
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
            entry = self._waiting.first()
            if entry is None or len(self._running) >= self._max_batch_size:
                return None
            if not self._kv_budget.fits(entry.generation.num_reserved_tokens):
                return None
            self._waiting.take(entry)
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
            self._waiting.discard(entry.handle.request_id)
            self._kv_budget.release(entry.handle.request_id)
            self._totals.finished[reason] += 1
            if reason == "error":
                self._failed_groups.add(entry.group_id)
                self._failed_at = time.perf_counter()
            elif reason in {"eos", "stop", "length"}:
                self._failed_groups.clear()
