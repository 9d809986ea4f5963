"""Writes outputs as objects of the OpenAI API."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

from monge.serve.errors import ApiError, internal, refused
from monge.serve.generation import GenerationFinish, Output, Summary
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

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the answer to a request that is no stream.

        Raises:
            ApiError: If a generation ended in an error.
        """
        scores = [output.prompt_logprobs for output in outputs]
        choices = [
            self._choice(
                index, replace(output, prompt_logprobs=scores[self.request.first_choice(index)])
            )
            for index, output in enumerate(outputs)
        ]
        return self._envelope(choices) | self._figures(outputs)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before any output: in a chat, the role of every choice."""
        if self.request.kind == "completion":
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        end = {"logprobs": None, "finish_reason": None}
        return [
            self._envelope([{"index": index, **delta, **end}])
            for index in range(len(self.request.choices))
        ]

    def chunk(self, index: int, output: Output, *, is_first: bool) -> dict[str, Any] | None:
        """Return what an output adds to a choice; `None` if that is nothing, since text is held back.

        Raises:
            ApiError: If the generation ended in an error.
        """
        choice = self._choice(index, output, is_first=is_first)
        text = choice["text"] if self.request.kind == "completion" else choice["delta"]
        if not text and choice["logprobs"] is None and output.finish_reason is None:
            return None
        return self._envelope([choice])

    def last(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the chunk with usage and no choices."""
        return self._envelope([]) | self._figures(outputs)

    def usage(self, num_generated: int) -> dict[str, int]:
        """Return the tokens so far."""
        shown = 0 if self.request.hides_completion else num_generated
        prompt = self.request.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": shown, "total_tokens": prompt + shown}

    def _figures(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return tokens and, where there is one choice, times and the worth of drafting."""
        summaries = [one.summary for one in outputs if one.summary is not None]
        usage = self.usage(sum(one.num_generated_tokens for one in summaries))
        metrics = {"metrics": metrics_of(summaries[0])} if len(summaries) == 1 else {}
        return {"usage": usage} | metrics

    def _choice(self, index: int, output: Output, *, is_first: bool = True) -> dict[str, Any]:
        request = self.request
        text = "" if request.hides_completion else output.text
        finish = self._finish(output)
        end = {"logprobs": self._logprobs(index, output), "finish_reason": finish}
        if request.kind == "completion":
            echo = request.echoes[index] if is_first and request.echoes else ""
            return {"index": index, "text": echo + text, **end}
        if request.is_stream:
            return {"index": index, "delta": {"content": text} if text else {}, **end}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, **end}

    def _finish(self, output: Output) -> str | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason not in FINISH:
            if output.finish_reason == "error":
                cause = None if output.summary is None else output.summary.cause
                _LOG.error("request %s: %s", self.request.response_id, cause, exc_info=cause)
            raise failure(output.finish_reason, self.request.response_id)
        return "length" if self.request.hides_completion else FINISH[output.finish_reason]

    def _logprobs(self, index: int, output: Output) -> dict[str, Any] | None:
        request = self.request.choices[index]
        if request.logprobs is None:
            return None
        writer = self._writers.setdefault(index, LogprobWriter(self.texts))
        entries = () if self.request.hides_completion else output.logprobs
        if self.request.kind == "chat":
            return writer.chat(entries) if entries else None
        scores = output.prompt_logprobs
        prompt = None if scores is None else (request.prompt_ids[0], scores)
        return writer.completion(entries, prompt) if entries or prompt else None

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = "chat.completion.chunk" if self.request.is_stream else "chat.completion"
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
    """Return the error of a generation that did not end well; its cause is for the log."""
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
    """Return the figures of one completion, in the fields of vLLM's per-request metrics.

    Depth of a tree counts as position, nodes without the root as draft tokens. Where nothing can be
    drafted, there is no `speculative_decoding`.
    """
    spec, count = summary.speculation, summary.num_generated_tokens
    generation_s = summary.total_s - summary.queue_s
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
        "time_to_first_token_ms": summary.first_token_s * _MS,
        "generation_time_ms": generation_s * _MS,
        "queue_time_ms": summary.queue_s * _MS,
        "mean_itl_ms": summary.decode_s / (count - 1) * _MS if count > 1 else None,
        "tokens_per_second": count / generation_s if generation_s > 0 else None,
    }
