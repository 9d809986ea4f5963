"""A generation in the scheduler, and its results: outputs, a summary, figures of speculation."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from monge.core.errors import MongeError
from monge.core.verdict import StepRecord
from monge.engine.session import FinishReason, Session
from monge.requests.grammar import FORCED
from monge.requests.logprobs import TokenLogprob

GenerationFinish = FinishReason | Literal["cancelled", "deadline"]
"""`eos`, `stop`, `length`, `error`, or ended by the client (`cancelled`) or by its deadline."""

Sink = Callable[[str, float | int], None]
"""Receives every observation, by the names of `monge.serve.observe.metrics`, in the decoding thread; it must be
quick and must not raise."""


class QueueFullError(MongeError, RuntimeError):
    """The queue is full; retry later."""

    def __init__(self, most: int) -> None:
        super().__init__(f"The queue is full ({most} requests); retry later.")


class SchedulerClosedError(MongeError, RuntimeError):
    """The scheduler accepts no more generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Figures of speculation, of a generation or of all.

    A round without candidates does not count as a draft, nor does a round whose tokens a grammar
    forces. Accepted tokens after a stop string count as accepted.

    Args:
        num_rounds: Target forwards after the prompt.
        num_draft_tokens: Nodes verified, roots not counted.
        acceptance_histogram: Number of drafts that accepted 0, 1, ... tokens, up to the depth of
            the drafter.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = (0,)

    def add(self, record: StepRecord) -> "Speculation":
        """Return the figures with a further round of a request."""
        if record.drafter == FORCED:
            return replace(self, num_rounds=self.num_rounds + 1)
        histogram = list(self.acceptance_histogram)
        histogram[record.num_accepted] += record.num_nodes > 0
        return Speculation(
            num_rounds=self.num_rounds + 1,
            num_draft_tokens=self.num_draft_tokens + record.num_nodes,
            acceptance_histogram=tuple(histogram),
        )

    @property
    def num_drafts(self) -> int:
        """Rounds with candidates."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(accepted * count for accepted, count in enumerate(self.acceptance_histogram))

    @property
    def max_depth(self) -> int:
        """Largest number of accepted tokens of a draft."""
        return len(self.acceptance_histogram) - 1

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Number of drafts that accepted more than 0, 1, ... tokens."""
        return tuple(sum(self.acceptance_histogram[depth + 1 :]) for depth in range(self.max_depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures in the last output of a generation. A stage that was not reached has 0 seconds.

    Args:
        num_generated_tokens: Tokens generated.
        num_cached_tokens: Prompt tokens that the prefix cache had.
        num_written_tokens: Prompt tokens that it keeps since this generation.
        speculation: Figures of speculation.
        queue_s: From submission to the first prefill chunk.
        prefill_s: From there to the end of the prefill, including rounds of other requests.
        first_token_s: From submission to the first token.
        decode_s: From the first token to the last.
        total_s: From submission to the end.
        cause: The error, if `finish_reason` is `error`; for logs, not for clients.
    """

    num_generated_tokens: int
    num_cached_tokens: int = 0
    num_written_tokens: int = 0
    speculation: Speculation = Speculation()
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    cause: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens and text of a generation: those of a round, or all of them.

    Args:
        text: New text; incomplete characters and possible stop strings are held back.
        token_ids: New tokens: the accepted tokens, then the correction or bonus token.
        logprobs: An entry for each token, if requested.
        prompt_logprobs: In the first output, if requested: an entry for each prompt token from the
            second on.
        finish_reason: Set in the last output.
        stop_string: In the last output, the stop string that ends the text, or `None`.
        summary: Set in the last output.
        records: Records of its rounds, if the request keeps their trees.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: GenerationFinish | None = None
    stop_string: str | None = None
    summary: Summary | None = None
    records: tuple[StepRecord, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """A session in the scheduler, with its client and its clock.

    Args:
        session: Its decoding.
        group_id: Number of the client request that this generation belongs to.
        client: Name of the client.
        controller: Name of the controller that plans for it, or `none`.
        put: Passes an output to the client, from any thread.
        sink: Receives observations.
        submitted_at: Arrival of its request, in seconds of `time.perf_counter`.
        deadline: When it ends with the text it has, on the same clock.
        speculation: Figures of its speculation so far.
    """

    session: Session
    group_id: int
    client: str
    controller: str
    put: Callable[[Output], None]
    sink: Sink
    submitted_at: float
    deadline: float = math.inf
    speculation: Speculation
    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0
    prefill_s: float = 0.0
    num_sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_complete: bool = False

    @property
    def request_id(self) -> int:
        """Number of the generation."""
        return self.session.context.request_id

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that it reserves in the caches."""
        request = self.session.request
        return len(request.prompt_ids) + request.max_new_tokens

    def send(self, output: Output) -> None:
        """Pass an output to the client. Outputs after the last are dropped."""
        with self._lock:
            if not self._is_complete:
                self._is_complete = output.finish_reason is not None
                self.put(output)

    def advance(self) -> tuple[Output, StepRecord | None]:
        """Return the output of the last round, and the round's record or `None`."""
        now, session = time.perf_counter(), self.session
        has_scores = self.num_sent == 0 and session.request.prompt_logprobs is not None
        token_ids = session.completion_ids[self.num_sent :]
        record = session.records[-1] if token_ids and session.error is None else None
        if token_ids:
            self._observe_tokens(now, record)
        if record is not None:
            self.speculation = self.speculation.add(record)
        self.num_sent += len(token_ids)
        text = self._new_text(last=session.finish_reason is not None)
        is_last = session.finish_reason is not None  # also if the text cannot be decoded
        output = Output(
            text=text,
            token_ids=token_ids,
            logprobs=session.logprobs if token_ids else (),
            prompt_logprobs=session.prompt_logprobs if has_scores else None,
            finish_reason=session.finish_reason,
            stop_string=None if session.text is None else session.text.stop_string,
            summary=self._summary(now) if is_last else None,
            records=(record,) if record is not None and record.tree is not None else (),
        )
        return output, record

    def end(self, reason: GenerationFinish, error: Exception | None = None) -> Output:
        """Return the last output of a generation that is ended from outside, with the text that it has."""
        if error is not None:
            self.session.fail(error)
        text = self._new_text(last=True)
        return Output(text=text, finish_reason=reason, summary=self._summary(time.perf_counter()))

    def abandon(self, reason: GenerationFinish) -> None:
        """Tell the client the end of a generation that the decoding thread still works at."""
        self.send(Output(finish_reason=reason, summary=Summary(num_generated_tokens=self.num_sent)))

    def _new_text(self, *, last: bool) -> str:
        text = self.session.text
        if text is None:
            return ""
        try:
            return text.take(last=last)
        except Exception as error:  # noqa: BLE001  tokenizers may raise anything
            self.session.fail(error)
            return ""

    def _observe_tokens(self, now: float, record: StepRecord | None) -> None:
        if self.first_at is None:
            self.first_at = now
            round_s = 0.0 if record is None else record.times.total_s
            self.prefill_s = max(0.0, now - (self.admitted_at or now) - round_s)
            self.sink("first_token_s", now - self.submitted_at)
        else:
            self.sink("inter_token_s", now - self.last_at)
        self.last_at = now

    def _summary(self, now: float) -> Summary:
        """Return the summary, and observe it."""
        has_begun, first_at = self.first_at is not None, self.first_at or 0.0
        summary = Summary(
            num_generated_tokens=self.num_sent,
            num_cached_tokens=self.session.num_cached,
            num_written_tokens=self.session.num_written,
            speculation=self.speculation,
            queue_s=(self.admitted_at or now) - self.submitted_at,
            prefill_s=self.prefill_s,
            first_token_s=first_at - self.submitted_at if has_begun else 0.0,
            decode_s=self.last_at - first_at if has_begun else 0.0,
            total_s=now - self.submitted_at,
            cause=self.session.error,
        )
        self.sink("queue_s", summary.queue_s)
        self.sink("total_s", summary.total_s)
        self.sink("prompt_tokens", len(self.session.request.prompt_ids))
        self.sink("generated_tokens", self.num_sent)
        if has_begun:
            self.sink("prefill_s", summary.prefill_s)
            self.sink("decode_s", summary.decode_s)
            self.sink("inference_s", summary.total_s - summary.queue_s)
        if self.num_sent > 1:
            self.sink("time_per_output_token_s", summary.decode_s / (self.num_sent - 1))
        return summary
