"""One generation while it is in the scheduler's hands."""

import time
from dataclasses import dataclass

from monge.core.verdict import StepRecord
from monge.engine.logprobs import LogprobOptions
from monge.engine.session import Request, Session, catch
from monge.serve.generation import (
    Event,
    GenerationFinish,
    GenerationRequest,
    Measure,
    Sink,
    Speculation,
    Summary,
    Timings,
)
from monge.serve.request_handle import RequestHandle
from monge.serve.speculation_counter import SpeculationCounter


@dataclass(slots=True, eq=False)
class ScheduledGeneration:
    """A generation, its session, its client and its clock.

    Args:
        generation: What was asked for.
        group_id: Number of the client request that this generation belongs to.
        client: Who asked for it.
        session: Its decoding.
        handle: Where its events go.
        counter: What drafting is worth to it.
        controller: Name of the controller that plans for it, or `none`.
        sink: Told what is observed.
        submitted_at: When its request came.
    """

    generation: GenerationRequest
    group_id: int
    client: str
    session: Session
    handle: RequestHandle
    counter: SpeculationCounter
    controller: str
    sink: Sink
    submitted_at: float
    admitted_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0
    prefill_s: float = 0.0
    num_sent: int = 0

    @property
    def is_oversized(self) -> bool:
        """Whether its record takes more memory than it may."""
        recording = self.generation.recording
        return recording is not None and recording.is_over(self.session)

    def advance(self) -> tuple[Event, StepRecord | None]:
        """What the last round added, and the round's record if there is one."""
        now, session = time.perf_counter(), self.session
        start = len(self.generation.prompt_ids) + self.num_sent
        token_ids = session.context.token_ids[start:]
        record = session.records[-1] if token_ids and session.error is None else None
        if token_ids:
            self._observe_tokens(now, record)
        if record is not None:
            self.counter.add(record)
        self.num_sent += len(token_ids)
        is_first = start == len(self.generation.prompt_ids)
        is_last = session.finish_reason is not None
        text = self._new_text(last=is_last)
        event = Event(
            text=text,
            token_ids=token_ids,
            num_accepted=0 if record is None else min(record.num_accepted, len(token_ids)),
            logprobs=session.logprobs if token_ids else (),
            prompt_logprobs=session.prompt_logprobs
            if is_first and self.generation.prompt_logprobs is not None
            else None,
            finish_reason=session.finish_reason,
            summary=self._summary(now) if is_last else None,
            recorded=session if is_last and self.generation.recording is not None else None,
        )
        return event, record

    def end(self, reason: GenerationFinish, error: Exception | None = None) -> Event:
        """The last event of a generation that is ended from outside, with the text that it has."""
        if error is not None:
            self.session.fail(error)
        return Event(
            text=self._new_text(last=True),
            finish_reason=reason,
            summary=self._summary(time.perf_counter()),
        )

    def abandoned(self, reason: GenerationFinish) -> Event:
        """The last event of a generation that the decoding thread still works at."""
        summary = Summary(
            num_prompt_tokens=len(self.generation.prompt_ids),
            num_generated_tokens=self.num_sent,
            speculation=Speculation(),
            timings=Timings(),
        )
        return Event(finish_reason=reason, summary=summary)

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
        timings = Timings(
            queue_s=(self.admitted_at or now) - self.submitted_at,
            prefill_s=self.prefill_s,
            first_token_s=0.0 if self.first_at is None else self.first_at - self.submitted_at,
            decode_s=0.0 if self.first_at is None else self.last_at - self.first_at,
            total_s=now - self.submitted_at,
        )
        for name, value in self._measures(timings).items():
            self.sink(name, value)
        return Summary(
            num_prompt_tokens=len(self.generation.prompt_ids),
            num_generated_tokens=self.num_sent,
            speculation=self.counter.total(),
            timings=timings,
            cause=self.session.error,
        )

    def _measures(self, timings: Timings) -> dict[Measure, float | int]:
        measures: dict[Measure, float | int] = {
            "queue_s": timings.queue_s,
            "total_s": timings.total_s,
            "prompt_tokens": len(self.generation.prompt_ids),
            "generated_tokens": self.num_sent,
        }
        if self.first_at is not None:
            measures["prefill_s"] = timings.prefill_s
            measures["decode_s"] = timings.decode_s
            measures["inference_s"] = timings.total_s - timings.queue_s
        if self.num_sent > 1:
            measures["time_per_output_token_s"] = timings.decode_s / (self.num_sent - 1)
        return measures


def request_of(generation: GenerationRequest) -> Request:
    """What a generation asks of a decoder.

    Raises:
        OptionError: If it asks for a record that cannot be kept.
    """
    made = Request(
        prompt_ids=generation.prompt_ids,
        max_new_tokens=generation.max_new_tokens,
        rules=generation.rules,
        seed=generation.seed,
        row=generation.row,
        eos_ids=generation.eos_ids,
        stop=generation.stop,
        processors=generation.processors,
        speculative=generation.speculative,
        adaptive=generation.adaptive,
        limits=generation.limits,
        controller=generation.controller,
        logprobs=None
        if generation.logprobs is None
        else LogprobOptions(num_top=generation.logprobs, source=generation.logprobs_of),
        prompt_logprobs=None
        if generation.prompt_logprobs is None
        else LogprobOptions(num_top=generation.prompt_logprobs, source="raw"),
    )
    recording = generation.recording
    return made if recording is None else recording.recorder.recorded(made)


def _take(session: Session, *, last: bool) -> str:
    if session.text is None:
        return ""
    if last:
        session.text.finish()
    return session.text.take(last=last)
