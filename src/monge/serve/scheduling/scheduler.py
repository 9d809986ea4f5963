"""Continuous batching: generations join and leave the rounds of a decoding thread."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from monge.core.errors import GrammarError, OptionError
from monge.engine.batch import Batch
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Request, check_length
from monge.networks.prefix_cache import PrefixCache
from monge.options import ServeOptions
from monge.runtime.process import release_openmp_pool, trim_heap
from monge.serve.scheduling.generation import (
    Generation,
    GenerationFinish,
    Output,
    QueueFullError,
    SchedulerClosedError,
    Sink,
    Speculation,
)
from monge.serve.scheduling.waiting_queue import WaitingQueue

_LOG: Final = logging.getLogger(__name__)
_UNBOUNDED_CONTEXT: Final = 32768
"""Tokens per row of the default budget, if the target has no limit."""
_QUIET_S: Final = 1.0
"""Idle seconds after which free memory is returned to the system."""
_CHUNK_S: Final = 0.25
"""Seconds that running requests wait for a chunk of new prompts."""
_LATE_S: Final = 2.0
"""Seconds that a round may take beyond the deadline of a generation before it is ended without it."""
_LAST_ROUND_S: Final = 8.0
"""Seconds for the round that runs when the scheduler is closed."""
_MOST_FAILURES: Final = 8
_FAILURES_S: Final = 60.0
"""If this many requests in a row fail, the engine is at fault, until none has failed for this long."""
NO_CONTROLLER: Final = "none"
"""The name used if no controller plans: nothing is drafted, or every round has the largest tree."""


def controller_of(request: Request, components: Components) -> str:
    """Return the name of the controller that plans for a request, or `none`."""
    if not (request.speculative and request.adaptive):
        return NO_CONTROLLER
    return components.controller_name if request.controller is None else request.controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a scheduler.

    Args:
        num_running: Generations that are decoding.
        num_prefilling: Generations whose prompt is being read.
        num_waiting: Generations in the queue.
        kv_used_tokens: Tokens reserved in the caches.
        kv_budget_tokens: Tokens that may be reserved or kept.
        kv_kept_tokens: Tokens in the prefix cache.
        is_open: Whether generations are accepted.
        failure: Why nothing is decoded properly: the decoding thread has ended, hangs in a round, or
            everything fails. `None` if all is well.
        num_prompt_tokens: Prompt tokens since the start.
        num_cached_tokens: Those of them that the prefix cache had.
        has_prefix_cache: Whether the target has a prefix cache.
        num_generated_tokens: Tokens generated since the start.
        finished: Generations ended since the start, by reason.
        speculation: Of all rounds since the start.
        by_controller: The same by controller; `none` for rounds without a controller.
    """

    num_running: int
    num_prefilling: int
    num_waiting: int
    kv_used_tokens: int
    kv_budget_tokens: int
    kv_kept_tokens: int = 0
    is_open: bool
    failure: str | None
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    has_prefix_cache: bool = False
    num_generated_tokens: int
    finished: Mapping[GenerationFinish, int] = field(default_factory=dict[GenerationFinish, int])
    speculation: Speculation = Speculation()
    by_controller: Mapping[str, Speculation] = field(default_factory=dict[str, Speculation])

    @property
    def is_well(self) -> bool:
        """True if requests are taken and decoded properly."""
        return self.is_open and self.failure is None


class Scheduler:
    """Decodes generations in a thread, which is the only thread that runs the networks.

    Between two rounds, three things happen. Generations that ended, were cancelled or passed their
    deadline leave. Waiting generations join if the batch and the caches have room for their longest
    completion; clients take turns. A chunk of the new prompts is read.

    An error of a generation (in a processor, in the drafter, or NaN logits) ends only that
    generation. The others get the text that they would get alone, unless the controller depends on
    the batch or on clocks.

    No other code may use the decoder while the scheduler runs.

    Args:
        decoder: The parts, the tokenizer, the number of generations that are decoded together.
        options: Of them, `max_waiting` counts client requests that wait, wholly or partly.
            `kv_budget_tokens` counts rows x longest row, since the caches are rectangular; by default
            each row of a full batch may fill the context of the target. What the prefix cache keeps
            counts too, and goes first where a generation waits for room. `prefill_chunk` shrinks if
            running requests would wait more than a quarter of a second. While a round takes longer
            than `round_timeout_s`, the snapshot has a failure.
        sink: Receives every observation.

    Raises:
        OptionError: If a limit is too small for any request.
    """

    def __init__(
        self, decoder: Decoder, options: ServeOptions | None = None, *, sink: Sink = lambda *_: None
    ) -> None:
        parts, options = decoder.components, options or ServeOptions()
        room = options.kv_budget_tokens
        if room is None:
            room = decoder.max_batch_size * (parts.target.max_length or _UNBOUNDED_CONTEXT)
        limits = ("max_waiting", options.max_waiting, 1), ("kv_budget_tokens", room, 2)
        for name, value, least in limits:
            if value < least:
                raise OptionError(f"{name} must be at least {least}; got {value}")
        self._decoder, self._options, self._sink = decoder, options, sink
        self._kv_budget_tokens = room
        self._changed = threading.Condition()
        self._waiting = WaitingQueue()
        self._running: dict[int, Generation] = {}
        self._leaving: dict[int, GenerationFinish] = {}
        self._round_began: float | None = None
        self._failed_groups, self._failed_at = set[int](), 0.0
        self._group_ids = count()
        self._is_open, self._failure = True, None
        depth = parts.drafter.capabilities.max_depth
        self._no_speculation = Speculation(acceptance_histogram=(0,) * (depth + 1))
        self._speculation = self._no_speculation
        names = (parts.controller_name, *parts.controllers, NO_CONTROLLER)
        self._by_controller = dict.fromkeys(names, self._no_speculation)
        self._finished: Counter[GenerationFinish] = Counter()
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        size, self._prefixes = options.prefix_cache_bytes, None
        if size:
            self._prefixes = PrefixCache(max_bytes=size, max_tokens=self._free_tokens)
        self._batch = self._new_batch()
        self._thread = threading.Thread(target=self._run, name="monge-decoding", daemon=True)

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(finish=False)

    def start(self) -> None:
        """Start the decoding thread; generations that were submitted before are decoded too."""
        release_openmp_pool()  # of the thread that loaded the models
        self._thread.start()

    def submit(
        self,
        requests: Sequence[Request],
        put: Callable[[int, Output], None],
        *,
        arrived: float | None = None,
        client: str = "",
        deadline_s: float | int = math.inf,
    ) -> list[int]:
        """Queue the generations of a client request, all or none. Any thread may call this.

        Args:
            requests: A request for each generation.
            put: Receives the place of a request and an output of it, from any thread. It must not
                block; the last output has a `finish_reason`.
            arrived: Arrival on the clock of `time.perf_counter`, from which deadlines and queue
                times count; `None` for now.
            client: Name of the client; clients take turns.
            deadline_s: Seconds after which generations end with the text they have.

        Returns:
            Numbers of the generations, for `cancel`.

        Raises:
            SchedulerClosedError: If the scheduler is closed.
            QueueFullError: If too many requests wait.
            ContextLengthError: If a generation cannot fit the context of a model or the caches.
            OptionError: If a request cannot be honoured.
        """
        with self._changed:  # before any session is made
            self._check_queue()
            group_id = next(self._group_ids)
        for request in requests:
            check_length(request, self._kv_budget_tokens, "server")
        submitted_at = time.perf_counter() if arrived is None else arrived
        entries = [
            Generation(
                session=self._decoder.session(request, keeps_records=False),
                group_id=group_id,
                client=client,
                controller=controller_of(request, self._decoder.components),
                put=partial(put, place),
                sink=self._sink,
                submitted_at=submitted_at,
                deadline=submitted_at + deadline_s,
                speculation=self._no_speculation,
            )
            for place, request in enumerate(requests)
        ]
        with self._changed:
            self._check_queue()
            for entry in entries:
                self._waiting.add(entry)
            self._changed.notify_all()
        return [entry.request_id for entry in entries]

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End generations, wherever they are. Any thread may call this."""
        with self._changed:
            for request_id in request_ids:
                self._leaving.setdefault(request_id, "cancelled")
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """Return the present state. Any thread may call this."""
        with self._changed:
            num_prefilling = self._batch.num_prefilling
            return Snapshot(
                num_running=len(self._running) - num_prefilling,
                num_prefilling=num_prefilling,
                num_waiting=len(self._waiting.entries),
                kv_used_tokens=self._kv_tokens(self._running.values()),
                kv_budget_tokens=self._kv_budget_tokens,
                kv_kept_tokens=0 if self._prefixes is None else self._prefixes.num_tokens,
                is_open=self._is_open,
                failure=self._current_failure(),
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                has_prefix_cache=self._prefixes is not None,
                num_generated_tokens=self._num_generated_tokens,
                finished=dict(self._finished),
                speculation=self._speculation,
                by_controller=dict(self._by_controller),
            )

    def close(self, *, finish: bool = True, timeout_s: float | int | None = None) -> None:
        """Accept no more generations and end the thread.

        Args:
            finish: Whether waiting and running generations are finished first; else they are
                cancelled.
            timeout_s: Seconds until the remaining generations are cancelled; `None` for no limit.
        """
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        if finish and self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._changed:
            left = [*self._waiting.entries.values(), *self._running.values()]
        self.cancel(entry.request_id for entry in left)
        if self._thread.is_alive():
            self._thread.join(_LAST_ROUND_S)
        if not self._thread.is_alive():
            self._sweep()
            if self._prefixes is not None:
                self._prefixes.clear()  # networks may be held longer
            return
        _LOG.error("the decoding thread hangs; %d generations are given up", len(left))
        for entry in left:
            entry.abandon("cancelled")

    def check(self) -> None:
        """End generations whose deadline passed while they wait, or while the decoding thread hangs.

        To be called now and then. Any thread may call this.
        """
        now = time.perf_counter()
        with self._changed:
            late = [entry for entry in self._running.values() if entry.deadline <= now - _LATE_S]
            late += [entry for entry in self._waiting.entries.values() if entry.deadline <= now]
            for entry in late:
                self._leaving[entry.request_id] = "deadline"
        for entry in late:
            entry.abandon("deadline")

    def _current_failure(self) -> str | None:
        """Return why nothing is decoded properly; the caller holds the lock."""
        now = time.perf_counter()
        if self._failure is not None:
            return self._failure
        most = self._options.round_timeout_s or math.inf
        if self._round_began is not None and now - self._round_began > most:
            return f"a round has taken longer than {most:g} s"
        if len(self._failed_groups) >= _MOST_FAILURES and now - self._failed_at < _FAILURES_S:
            return f"the last {len(self._failed_groups)} requests all ended in errors"
        return None

    def _check_queue(self) -> None:
        """Refuse a request if the queue is full or closed; the caller holds the lock."""
        if not self._is_open:
            raise SchedulerClosedError(
                f"no more generations are taken: {self._failure or 'the scheduler is closing'}"
            )
        most = self._options.max_waiting
        if self._waiting.num_requests >= most:
            raise QueueFullError(most)

    @staticmethod
    def _kv_tokens(entries: Iterable[Generation]) -> int:
        """Return the tokens of rectangular caches: rows x longest row. A row that has ended is free."""
        sizes = [row.num_reserved_tokens for row in entries if row.session.finish_reason is None]
        return len(sizes) * max(sizes, default=0)

    def _free_tokens(self) -> int:
        """Return the tokens that no running generation reserves."""
        return self._kv_budget_tokens - self._kv_tokens(self._running.values())

    def _new_batch(self) -> Batch:
        return Batch(
            self._decoder.components,
            prefill_chunk=self._options.prefill_chunk,
            chunk_s=_CHUNK_S,
            isolated=True,
            prefixes=self._prefixes,
        )

    def _run(self) -> None:
        try:
            self._decode()
        except BaseException as error:  # noqa: BLE001  a SystemExit, too: clients wait
            was_ended = SystemError("the decoding thread was ended")
            self._give_up(error if isinstance(error, Exception) else was_ended)

    def _give_up(self, error: Exception) -> None:
        """End all generations with an error, and take no more."""
        _LOG.error("the decoding thread has ended", exc_info=error)
        with self._changed:
            self._is_open, self._failure = False, f"{type(error).__name__}: {error}"
            self._round_began = None
            left = [*self._running.values(), *self._waiting.entries.values()]
        for entry in left:
            entry.sink = lambda *_: None  # the sink may be the cause
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
            return bool(self._waiting.entries or self._running)

    def _is_called(self) -> bool:
        return bool(self._waiting.entries or self._running or not self._is_open)

    def _sweep(self) -> None:
        """End generations that were cancelled or passed their deadline."""
        now = time.perf_counter()
        with self._changed:
            for request_id, entry in self._running.items():
                if entry.deadline <= now:
                    self._leaving.setdefault(request_id, "deadline")
            reasons, self._leaving = self._leaving, {}
        for request_id, reason in reasons.items():
            if entry := self._running.get(request_id):
                self._batch.leave(entry.session)
            if entry := entry or self._waiting.entries.get(request_id):
                self._end(entry, reason)

    def _admit(self) -> None:
        """Admit generations in queue order while they fit."""
        while entry := self._next():
            entry.admitted_at = time.perf_counter()
            if self._prefixes is not None:
                # The beginning of its own prompt goes last.
                request = entry.session.request
                self._prefixes.length(
                    self._decoder.components.target, request.prompt_ids, request.cache_salt
                )
                self._prefixes.trim()
            try:
                self._batch.join([entry.session])
            except Exception as error:  # noqa: BLE001  of the request's own code
                self._end(entry, "error", error)

    def _next(self) -> Generation | None:
        with self._changed:
            entry = self._waiting.first()
            if entry is None or len(self._running) >= self._decoder.max_batch_size:
                return None
            if self._kv_tokens([*self._running.values(), entry]) > self._kv_budget_tokens:
                return None
            self._waiting.take(entry)
            self._running[entry.request_id] = entry
            return entry

    def _round(self) -> None:
        before = self._batch.num_prompt_tokens
        try:
            served = self._batch.step(num_waiting=len(self._waiting.entries))
        except Exception as error:  # noqa: BLE001  parts may raise anything
            self._start_over(error)
            return
        num_tokens = self._batch.num_prompt_tokens - before
        outputs = list[tuple[Generation, Output]]()
        try:
            for session in served:
                entry = self._running[session.context.request_id]
                outputs.append((entry, self._counted(entry)))
                num_tokens += len(outputs[-1][1].token_ids)
            self._sink("round_tokens", num_tokens)
        finally:
            # Last, so that a client that reads the end finds the round and the generation counted.
            for entry, output in outputs:
                entry.send(output)

    def _counted(self, entry: Generation) -> Output:
        """Count the new tokens of a generation, and return them."""
        is_first = entry.num_sent == 0
        output, record = entry.advance()
        with self._changed:
            self._num_generated_tokens += len(output.token_ids)
            if is_first and output.token_ids:
                self._num_prompt_tokens += len(entry.session.request.prompt_ids)
                self._num_cached_tokens += entry.session.num_cached
            if record is not None:
                name = entry.controller
                self._speculation = self._speculation.add(record)
                self._by_controller[name] = self._by_controller[name].add(record)
        if output.finish_reason is not None:
            self._forget(entry, output.finish_reason)
        return output

    def _start_over(self, error: Exception) -> None:
        """End all generations of a failed round; waiting generations get a new batch."""
        batch, self._batch = self._batch, self._new_batch()
        for entry in list(self._running.values()):
            self._end(entry, "error", error)
        batch.close()

    def _end(
        self, entry: Generation, reason: GenerationFinish, error: Exception | None = None
    ) -> None:
        output = entry.end(reason, error)
        self._forget(entry, reason)
        entry.send(output)

    def _forget(self, entry: Generation, reason: GenerationFinish) -> None:
        with self._changed:
            self._running.pop(entry.request_id, None)
            self._waiting.discard(entry.request_id)
            self._finished[reason] += 1
            if reason == "error" and not isinstance(entry.session.error, GrammarError):
                self._failed_groups.add(entry.group_id)
                self._failed_at = time.perf_counter()
            elif reason in {"eos", "stop", "length"}:
                self._failed_groups.clear()
