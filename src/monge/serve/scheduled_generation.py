"""One generation while it is in the scheduler's hands."""

import time
from dataclasses import dataclass

from monge.core.verdict import StepRecord
from monge.engine.session import Request, Session, catch
from monge.serve.generation import GenerationFinish, Measure, Output, Sink, Speculation, Summary
from monge.serve.records import Recording
from monge.serve.request_handle import RequestHandle


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledGeneration:
    """A request of the engine, its session, its client and its clock.

    Args:
        request: The request.
        recording: How its rounds are recorded; `None` records nothing.
        group_id: Number of the client request that this generation belongs to.
        client: Name of the client.
        session: Its decoding.
        handle: Passes its outputs to the client.
        speculation: Figures of its speculation so far.
        controller: Name of the controller that plans for it, or `none`.
        sink: Receives observations.
        submitted_at: Arrival of its request.
    """

    request: Request
    recording: Recording | None
    group_id: int
    client: str
    session: Session
    handle: RequestHandle
    speculation: Speculation
    controller: str
    sink: Sink
    submitted_at: float
    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0
    prefill_s: float = 0.0
    num_sent: int = 0

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that it reserves in the caches."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def is_oversized(self) -> bool:
        """Return whether its record takes more memory than it may."""
        return self.recording is not None and self.recording.is_over(self.session)

    def advance(self) -> tuple[Output, StepRecord | None]:
        """Return what the last round added, and the round's record if there is one."""
        now, session = time.perf_counter(), self.session
        has_scores = self.num_sent == 0 and self.request.prompt_logprobs is not None
        token_ids = session.completion_ids[self.num_sent :]
        record = session.records[-1] if token_ids and session.error is None else None
        if token_ids:
            self._observe_tokens(now, record)
        if record is not None:
            self.speculation = self.speculation.add(record)
        self.num_sent += len(token_ids)
        text = self._new_text(last=session.finish_reason is not None)
        is_last = session.finish_reason is not None  # also where the text cannot be decoded
        output = Output(
            text=text,
            token_ids=token_ids,
            logprobs=session.logprobs if token_ids else (),
            prompt_logprobs=session.prompt_logprobs if has_scores else None,
            finish_reason=session.finish_reason,
            summary=self._summary(now) if is_last else None,
            recorded=session if is_last and self.recording is not None else None,
        )
        return output, record

    def end(self, reason: GenerationFinish, error: Exception | None = None) -> Output:
        """Return the last output of a generation that is ended from outside, with the text that it has."""
        if error is not None:
            self.session.fail(error)
        return Output(
            text=self._new_text(last=True),
            finish_reason=reason,
            summary=self._summary(time.perf_counter()),
        )

    def abandoned(self, reason: GenerationFinish) -> Output:
        """Return the last output of a generation that the decoding thread still works at."""
        return Output(finish_reason=reason, summary=Summary(num_generated_tokens=self.num_sent))

    def _new_text(self, *, last: bool) -> str:
        found: list[str] = []
        error = catch(lambda: found.append(_take(self.session, last=last)))
        if error is not None:
            self.session.fail(error)
        return "".join(found)

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
        summary = Summary(
            num_generated_tokens=self.num_sent,
            speculation=self.speculation,
            queue_s=(self.admitted_at or now) - self.submitted_at,
            prefill_s=self.prefill_s,
            first_token_s=0.0 if self.first_at is None else self.first_at - self.submitted_at,
            decode_s=0.0 if self.first_at is None else self.last_at - self.first_at,
            total_s=now - self.submitted_at,
            cause=self.session.error,
        )
        for name, value in self._measures(summary).items():
            self.sink(name, value)
        return summary

    def _measures(self, summary: Summary) -> dict[Measure, float | int]:
        measures: dict[Measure, float | int] = {
            "queue_s": summary.queue_s,
            "total_s": summary.total_s,
            "prompt_tokens": len(self.request.prompt_ids),
            "generated_tokens": self.num_sent,
        }
        if self.first_at is not None:
            measures["prefill_s"] = summary.prefill_s
            measures["decode_s"] = summary.decode_s
            measures["inference_s"] = summary.total_s - summary.queue_s
        if self.num_sent > 1:
            measures["time_per_output_token_s"] = summary.decode_s / (self.num_sent - 1)
        return measures


def _take(session: Session, *, last: bool) -> str:
    if session.text is None:
        return ""
    if last:
        session.text.finish()
    return session.text.take(last=last)
