"""From events and completions to the objects of the OpenAI API."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from monge.engine.logprobs import TokenLogprob
from monge.serve.errors import ApiError, internal, refused
from monge.serve.generation import Completion, Event, GenerationFinish, Summary
from monge.serve.logprobs import LogprobWriter
from monge.serve.request_parser import ParsedRequest
from monge.serve.token_text import TokenTexts

FINISH: Final[dict[GenerationFinish, str]] = {"eos": "stop", "stop": "stop", "length": "length"}
"""Words of the API for the ends that are no errors."""

_MS: Final = 1000.0
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Writes the answer to one request, whole or in chunks.

    Args:
        request: The parsed request.
        model_name: Name of the model.
        fingerprint: Names what determines a seeded answer beside the request.
        texts: Names tokens.
    """

    request: ParsedRequest
    model_name: str
    fingerprint: str
    texts: TokenTexts
    _writers: dict[int, LogprobWriter] = field(default_factory=dict[int, LogprobWriter], init=False)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer to a request that is no stream.

        Raises:
            ApiError: If a completion ended in an error.
        """
        scores = [completion.prompt_logprobs for completion in completions]
        choices = [
            self._choice(index, completion, scores[self.request.first_choice(index)])
            for index, completion in enumerate(completions)
        ]
        summaries = [completion.summary for completion in completions]
        return (
            self._envelope(choices, is_chunk=False)
            | {"usage": self.usage(summaries)}
            | self.metrics(summaries)
        )

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any event: in a chat, the role of every choice."""
        if self.request.kind == "completion":
            return []
        start = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [
            self._envelope([{"index": index, **start}], is_chunk=True)
            for index in range(len(self.request.generations))
        ]

    def chunk(self, index: int, event: Event, *, is_first: bool) -> dict[str, Any] | None:
        """What an event adds to a choice.

        `None` where that is nothing, since text may be held back.

        Raises:
            ApiError: If the choice ended in an error.
        """
        text = "" if self.request.hides_completion else event.text
        if is_first and self.request.echoes:
            text = self.request.echoes[index] + text
        logprobs = self._logprobs(index, event)
        if not text and logprobs is None and event.finish_reason is None:
            return None
        part = (
            {"text": text}
            if self.request.kind == "completion"
            else {"delta": {"content": text} if text else {}}
        )
        end = {"logprobs": logprobs, "finish_reason": self._finish(event)}
        return self._envelope([{"index": index, **part, **end}], is_chunk=True)

    def last(self, summaries: Sequence[Summary]) -> dict[str, Any]:
        """The chunk with usage and no choices."""
        return (
            self._envelope([], is_chunk=True)
            | {"usage": self.usage(summaries)}
            | self.metrics(summaries)
        )

    def usage(self, summaries: Sequence[Summary]) -> dict[str, int]:
        """Tokens of a finished request."""
        return self.usage_of(sum(summary.num_generated_tokens for summary in summaries))

    def usage_of(self, num_generated: int) -> dict[str, int]:
        """Tokens so far."""
        shown = 0 if self.request.hides_completion else num_generated
        prompt = self.request.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": shown, "total_tokens": prompt + shown}

    def metrics(self, summaries: Sequence[Summary]) -> dict[str, Any]:
        """What drafting was worth, and times; only where there is one choice."""
        return {"metrics": metrics_of(summaries[0])} if len(summaries) == 1 else {}

    def _choice(
        self, index: int, completion: Completion, scores: Sequence[TokenLogprob] | None
    ) -> dict[str, Any]:
        event = Event(
            text=completion.text,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            prompt_logprobs=None if scores is None else tuple(scores),
            finish_reason=completion.finish_reason,
            summary=completion.summary,
        )
        finish = self._finish(event)
        end = {"logprobs": self._logprobs(index, event), "finish_reason": finish}
        text = "" if self.request.hides_completion else completion.text
        if self.request.kind == "chat":
            return {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                **end,
            }
        echo = self.request.echoes[index] if self.request.echoes else ""
        return {"index": index, "text": echo + text, **end}

    def _finish(self, event: Event) -> str | None:
        if event.finish_reason is None:
            return None
        if event.finish_reason not in FINISH:
            if event.finish_reason == "error":
                cause = None if event.summary is None else event.summary.cause
                _LOG.error("request %s: %s", self.request.response_id, cause, exc_info=cause)
            raise failure(event.finish_reason, self.request.response_id)
        return "length" if self.request.hides_completion else FINISH[event.finish_reason]

    def _logprobs(self, index: int, event: Event) -> dict[str, Any] | None:
        if self.request.generations[index].logprobs is None:
            return None
        if index not in self._writers:
            self._writers[index] = LogprobWriter(self.texts)
        entries = () if self.request.hides_completion else event.logprobs
        if self.request.kind == "chat":
            return self._writers[index].chat(entries) if entries else None
        first = self.request.generations[index].prompt_ids[0]
        prompt = None if event.prompt_logprobs is None else (first, event.prompt_logprobs)
        return self._writers[index].completion(entries, prompt) if entries or prompt else None

    def _envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.request.response_id,
            "object": chat if self.request.kind == "chat" else "text_completion",
            "created": self.request.created,
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
            "seed": self.request.seed,
            "choices": choices,
        }


def failure(reason: GenerationFinish, response_id: str) -> ApiError:
    """The answer where a completion did not end well; what it was is for the log."""
    if reason == "deadline":
        text = "the request took longer than this server allows; ask for fewer tokens"
        return ApiError(HTTPStatus.GATEWAY_TIMEOUT, text, code="request_timeout")
    if reason == "oversized":
        text = (
            "certificate: the record takes more memory than this server allows; ask for fewer "
            "tokens, or send temperature 0 or top_k"
        )
        return refused(text, "certificate", "certificate_too_large")
    if reason == "cancelled":
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server ended the request to shut down",
            code="shutting_down",
        )
    return internal(response_id)


def metrics_of(summary: Summary) -> dict[str, Any]:
    """Figures of one completion, in the fields of vLLM's per-request metrics.

    Depth of a tree counts as position, nodes without the root as draft tokens. Where nothing can be
    drafted, there is no `speculative_decoding`.
    """
    spec, times, count = summary.speculation, summary.timings, summary.num_generated_tokens
    generation_s = times.total_s - times.queue_s
    drafting = {
        "mean_acceptance_length": spec.mean_acceptance_length,
        "draft_acceptance_rate": spec.draft_acceptance_rate,
        "acceptance_histogram": list(spec.acceptance_histogram),
        "num_spec_steps": spec.num_drafts,
        "num_accepted_draft_tokens": spec.num_accepted_tokens,
        "num_draft_tokens": spec.num_draft_tokens,
        "num_spec_tokens": spec.max_depth,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }
    return {
        "speculative_decoding": drafting if spec.max_depth else None,
        "time_to_first_token_ms": times.first_token_s * _MS,
        "generation_time_ms": generation_s * _MS,
        "queue_time_ms": times.queue_s * _MS,
        "mean_itl_ms": times.decode_s / (count - 1) * _MS if count > 1 else None,
        "tokens_per_second": count / generation_s if generation_s > 0 else None,
    }
