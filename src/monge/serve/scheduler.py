"""Continuous batching: jobs of many clients join and leave the rounds of one decoding thread."""

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
from monge.serve.entry import Entry, request_of
from monge.serve.jobs import Job, JobFinish, Measure, QueueFullError, SchedulerClosedError, Sink, Snapshot
from monge.serve.planners import Planners
from monge.serve.room import Room
from monge.serve.tally import SpeculationTally, Totals
from monge.serve.ticket import Ticket

_UNBOUNDED_CONTEXT: Final = 32768
"""Tokens per row of the default budget, for a target that sets no limit itself."""
_QUIET_S: Final = 1.0
"""Seconds without a job after which free memory goes back to the system."""

_PIECE_S: Final = 0.25
"""Seconds that the requests which are being decoded wait for a piece of new prompts."""


def no_sink(measure: Measure, value: float | int) -> None:
    """Observe nothing."""


class Scheduler:
    """Decodes jobs as they come, in a thread of its own, which is the only one that touches the networks.

    Between two rounds, jobs that ended, were cancelled or are late leave, waiting ones join in the order in which they came, as
    long as the batch and the caches have room for all that they may still write, and a piece of the new prompts is read. What
    one job raises (in a processor, in the drafter, or by NaN logits) ends that job; the others get the text that they would
    have got alone, wherever the controller does not look at neighbours or clocks.

    While it runs, nobody else may use the decoder.

    Args:
        decoder: The parts, the tokenizer.
        max_batch_size: Jobs decoded together; `None` takes the decoder's.
        max_waiting: Requests that may wait, whole or with some of their jobs.
        kv_budget_tokens: Room in the caches: rows x longest row; `None` lets every row of a full batch be as long as the
            target's context.
        prefill_chunk: Prompt tokens that are read between two rounds; fewer where others would wait for more than a quarter of
            a second.
        sink: Told every observation.

    Raises:
        OptionError: If a limit leaves no room for anything.
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
        self._room = Room(self._max_batch_size * row if kv_budget_tokens is None else kv_budget_tokens)
        for name, value in (("max_batch_size", self._max_batch_size), ("max_waiting", max_waiting)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1; got {value}")
        if self._room.budget < 2:
            raise OptionError(f"kv_budget_tokens must hold a prompt and a token, at least 2; got {kv_budget_tokens}")
        self._max_depth = decoder.components.drafter.capabilities.max_depth
        self._changed = threading.Condition()
        self._waiting: deque[Entry] = deque()
        self._running: dict[int, Entry] = {}
        self._cancelled: set[int] = set()
        self._order_ids = count()
        self._is_open, self._failure = True, None
        self._planners = Planners(decoder.components)
        self._totals = Totals(self._max_depth, self._planners.names)
        self._batch = self._new_batch()
        self._thread = threading.Thread(target=self._run, name="monge-decoding", daemon=True)

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(drain=False)

    def start(self) -> None:
        """Begin to decode; what was submitted before has waited."""
        self._thread.start()

    def submit(self, job: Job) -> Ticket:
        """Queue a job, as a request of its own. May be called from any thread.

        Raises:
            SchedulerClosedError: If no jobs are taken any more.
            QueueFullError: If too many wait.
            ContextLengthError: If the job can never fit a model's context or the caches.
            OptionError: If it cannot be honoured.
        """
        (ticket,) = self.submit_all([job])
        return ticket

    def submit_all(self, jobs: Sequence[Job], *, arrived: float | None = None) -> list[Ticket]:
        """Queue the jobs of one request, all or none of them. May be called from any thread.

        Args:
            jobs: The jobs.
            arrived: When the request came, on the clock of `time.perf_counter`; its deadlines and its waiting count from there.
                `None` for now.

        Raises:
            SchedulerClosedError, QueueFullError, ContextLengthError, OptionError: As `submit`.
        """
        with self._changed:  # before sessions are made for nothing
            self._check_queue()
            order_id = next(self._order_ids)
        submitted_at = time.perf_counter() if arrived is None else arrived
        entries = [self._entry(job, order_id, submitted_at) for job in jobs]
        with self._changed:
            self._check_queue()
            self._waiting.extend(entries)
            self._changed.notify_all()
        return [entry.ticket for entry in entries]

    def snapshot(self) -> Snapshot:
        """The present state. May be called from any thread."""
        with self._changed:
            num_prefilling = self._batch.num_prefilling
            return Snapshot(
                num_running=len(self._running) - num_prefilling,
                num_prefilling=num_prefilling,
                num_waiting=len(self._waiting),
                kv_used_tokens=self._room.used,
                kv_budget_tokens=self._room.budget,
                is_open=self._is_open,
                failure=self._failure,
                num_prompt_tokens=self._totals.num_prompt_tokens,
                num_generated_tokens=self._totals.num_generated_tokens,
                finished=dict(self._totals.finished),
                speculation=self._totals.speculation.total(),
                by_controller={name: tally.total() for name, tally in self._totals.by_controller.items()},
            )

    def close(self, *, drain: bool = True, timeout_s: float | int | None = None) -> None:
        """Take no more jobs and end the thread.

        Args:
            drain: Whether jobs that wait or run are finished first; else they are cancelled.
            timeout_s: How long to wait for that before what is left is cancelled; `None` for as long as it takes.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if drain and self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._changed:
            self._cancelled.update(entry.ticket.request_id for entry in (*self._waiting, *self._running.values()))
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._sweep()

    def _entry(self, job: Job, order_id: int, submitted_at: float) -> Entry:
        if job.num_reserved_tokens > self._room.budget:
            raise ContextLengthError(
                f"prompt of {len(job.prompt_ids)} tokens + max_new_tokens={job.max_new_tokens} = {job.num_reserved_tokens} "
                f"exceeds the {self._room.budget} tokens of all caches together; shorten the prompt or ask for fewer tokens"
            )
        session = self._decoder.session(request_of(job), keeps_records=False)
        request_id = session.context.request_id
        return Entry(
            job=job,
            order_id=order_id,
            session=session,
            ticket=Ticket(request_id, lambda: self._cancel(request_id)),
            tally=SpeculationTally(self._max_depth),
            planner=self._planners.of(job),
            sink=self._sink,
            submitted_at=submitted_at,
        )

    def _check_queue(self) -> None:
        """Refuse a request that may not wait; under the lock."""
        if not self._is_open:
            raise SchedulerClosedError(f"no more jobs are taken: {self._failure or 'the scheduler is closing'}")
        num_waiting = len({entry.order_id for entry in self._waiting})
        if num_waiting >= self.max_waiting:
            raise QueueFullError(f"{num_waiting} requests are waiting, as many as may; try again later")

    def _cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def _new_batch(self) -> Batch:
        return Batch(self._decoder.components, prefill_chunk=self._prefill_chunk, piece_s=_PIECE_S, isolated=True)

    def _run(self) -> None:
        error = catch(self._decode)
        if error is not None:
            with self._changed:
                self._is_open, self._failure = False, f"{type(error).__name__}: {error}"
                left = [*self._running.values(), *self._waiting]
                self._waiting.clear()
            for entry in left:
                entry.sink = no_sink  # which may be what failed
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
            trim_heap()  # outside of the lock: clients that come now need not wait for it
        with self._changed:
            self._changed.wait_for(self._is_called)
            return bool(self._waiting or self._running)

    def _is_called(self) -> bool:
        return bool(self._waiting or self._running or not self._is_open)

    def _sweep(self) -> None:
        """End what was cancelled or is late."""
        now = time.perf_counter()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            known = [*self._waiting, *self._running.values()]
            leaving = [entry for entry in known if entry.ticket.request_id in cancelled or entry.is_late(now)]
            gone = {entry.ticket.request_id for entry in leaving}
            self._waiting = deque(entry for entry in self._waiting if entry.ticket.request_id not in gone)
        for entry in leaving:
            if entry.ticket.request_id in self._running:
                self._batch.leave(entry.session)
            self._end(entry, "cancelled" if entry.ticket.request_id in cancelled else "deadline")

    def _admit(self) -> None:
        """Let the first of the queue in, as long as there is room; nobody overtakes."""
        while entry := self._next():
            entry.admitted_at = time.perf_counter()
            error = catch(lambda session=entry.session: self._batch.join([session]))
            if isinstance(error, OutOfStepError):
                raise error
            if error is not None:
                self._end(entry, "error", error)

    def _next(self) -> Entry | None:
        with self._changed:
            if not self._waiting or len(self._running) >= self._max_batch_size:
                return None
            entry = self._waiting[0]
            if not self._room.has_room(entry.job.num_reserved_tokens):
                return None
            self._waiting.popleft()
            self._running[entry.ticket.request_id] = entry
            self._room.take(entry.ticket.request_id, entry.job.num_reserved_tokens)
            return entry

    def _round(self) -> None:
        before, served = self._batch.num_prompt_tokens, list[Session]()
        error = catch(lambda: served.extend(self._batch.step(num_waiting=len(self._waiting))))
        for one in (error, *(session.error for session in served)):
            if isinstance(one, OutOfStepError):
                raise one  # no later round can be better
        if error is not None:
            self._start_over(error)
            return
        num_tokens = self._batch.num_prompt_tokens - before
        for session in served:
            num_tokens += self._tell(self._running[session.context.request_id])
        self._sink("round_tokens", num_tokens)

    def _tell(self, entry: Entry) -> int:
        """Send what the round added to a job; the number of new tokens."""
        is_first = entry.num_sent == 0
        event, record = entry.advance()
        with self._changed:
            self._totals.num_generated_tokens += len(event.token_ids)
            if is_first and event.token_ids:
                self._totals.num_prompt_tokens += len(entry.job.prompt_ids)
            if record is not None:
                self._totals.add(record, entry.planner)
        if event.finish_reason is not None:
            self._forget(entry, event.finish_reason)
        # Last, so that whoever reads the end of a job finds it counted.
        entry.ticket.put(event)
        return len(event.token_ids)

    def _start_over(self, error: Exception) -> None:
        """A round that failed as a whole ends all jobs that took part; whoever waits gets a fresh batch."""
        batch, self._batch = self._batch, self._new_batch()
        for entry in list(self._running.values()):
            self._end(entry, "error", error)
        batch.close()

    def _end(self, entry: Entry, reason: JobFinish, error: Exception | None = None) -> None:
        event = entry.end(reason, error)
        self._forget(entry, reason)
        entry.ticket.put(event)

    def _forget(self, entry: Entry, reason: JobFinish) -> None:
        with self._changed:
            self._running.pop(entry.ticket.request_id, None)
            self._room.give_back(entry.ticket.request_id)
            self._totals.finished[reason] += 1
