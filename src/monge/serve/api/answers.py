"""Writes outputs as objects of the OpenAI API, with log-probabilities in its two forms."""

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any, Final

from monge.page.trace import Origins, RunTrace
from monge.requests.logprobs import Drawn, TokenLogprob
from monge.requests.text import PlacedTexts, TokenTexts
from monge.serve.api.call_reader import CallReader
from monge.serve.api.errors import ApiError, failure
from monge.serve.api.request_parser import ParsedRequest
from monge.serve.scheduling.generation import GenerationFinish, Output, Summary

FINISH: Final[dict[GenerationFinish, str]] = {"eos": "stop", "stop": "stop", "length": "length"}
"""Words of the API for the ends that are no errors."""

_MS: Final = 1000.0
_LOWEST: Final = -9999.0
"""Log-probability of an impossible token, as in vLLM; JSON has no infinity."""
_LINE_ENDS: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Letters at which many clients cut the lines of a stream, escaped; JSON escapes the others itself."""
_OTHER_TOKENS: Final = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")
_DRAWN: Final = tuple(part.name for part in fields_of(Drawn))
_LOG: Final = logging.getLogger(__name__)


class Json(str):
    """Text that is JSON already.

    Answers have up to half a million log-probabilities. As objects, each would take a microsecond of
    every garbage collection, and `json.dumps` would hold the interpreter for all of them.
    """

    __slots__ = ()


def dumped(value: Any) -> str:  # noqa: ANN401 (any JSON)
    """Return JSON of objects and lists, in which some values may be `Json`; no call takes long."""
    if isinstance(value, Json):
        return value
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{dumped(item)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[" + ",".join(map(dumped, value)) + "]"
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Writes the answer to a request, whole or in chunks.

    Args:
        request: The parsed request.
        model_name: Name of the model.
        fingerprint: Names what determines a seeded answer beside the request.
        texts: Names tokens.
        origins: Origins of accepted tokens, for traces.
    """

    request: ParsedRequest
    model_name: str
    fingerprint: str
    texts: TokenTexts
    origins: Origins
    _offsets: Counter[int] = field(default_factory=Counter[int], init=False)
    _placed: dict[int, PlacedTexts] = field(default_factory=dict[int, PlacedTexts], init=False)
    _readers: dict[int, CallReader] = field(default_factory=dict[int, CallReader], init=False)
    _traces: dict[int, RunTrace] = field(default_factory=dict[int, RunTrace], init=False)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the answer to a request that is no stream.

        Raises:
            ApiError: If a generation ended in an error.
        """
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        prompt = self._of_prompt(0, outputs[0]) if self.request.is_chat else {}
        return self._envelope(choices) | prompt | self._figures(outputs)

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before any output: in a chat, the role of every choice."""
        if not self.request.is_chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        end = {"logprobs": None, "finish_reason": None}
        prompt, indices = self._of_prompt(0, Output()), range(len(self.request.choices))
        return [self._envelope([{"index": index, **delta, **end}]) | prompt for index in indices]

    def chunks(self, index: int, output: Output, *, is_first: bool) -> list[dict[str, Any]]:
        """Return what an output adds to a choice; nothing where text is held back.

        Raises:
            ApiError: If the generation ended in an error.
        """
        choice = self._choice(index, output, is_first=is_first)
        text = choice["text"] if not self.request.is_chat else choice["delta"]
        has_more = choice["logprobs"] is not None or choice.get("token_ids") or output.records
        if not (text or has_more or output.finish_reason is not None):
            return []
        return [self._envelope([choice])]

    def closing(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        """Return the chunks after the last output: usage without choices, if it is wanted."""
        wanted = self.request.body.stream_options
        is_wanted = wanted is not None and wanted.include_usage
        return [self._envelope([]) | self._figures(outputs)] if is_wanted else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the chunk of an error after the first chunk."""
        return error.body()

    def cached(self, outputs: Sequence[Output]) -> dict[str, int]:
        """Return prompt tokens that the prefix cache had and got; each prompt counts once, by its last outputs."""
        firsts = [output.summary for output in outputs[:: self.request.body.n or 1]]
        summaries = [summary for summary in firsts if summary is not None]
        return {
            "cached_tokens": sum(summary.num_cached_tokens for summary in summaries),
            "cache_write_tokens": sum(summary.num_written_tokens for summary in summaries),
        }

    def usage(self, num_generated: int) -> dict[str, Any]:
        """Return the tokens so far."""
        shown = 0 if self.request.hides_completion else num_generated
        prompt = self.request.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": shown, "total_tokens": prompt + shown}

    def _figures(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return tokens and, for a single choice, also times and the worth of drafting."""
        summaries = [output.summary for output in outputs if output.summary is not None]
        usage = self.usage(sum(summary.num_generated_tokens for summary in summaries))
        prompt = {"text_tokens": usage["prompt_tokens"], "audio_tokens": 0, "image_tokens": 0}
        usage["prompt_tokens_details"] = self.cached(outputs) | prompt
        details = {f"{kind}_tokens": 0 for kind in _OTHER_TOKENS}
        details["text_tokens"] = usage["completion_tokens"]
        usage["completion_tokens_details"] = details
        metrics = {"metrics": metrics_of(summaries[0])} if len(summaries) == 1 else {}
        return {"usage": usage} | metrics

    def _choice(self, index: int, output: Output, *, is_first: bool = True) -> dict[str, Any]:
        request = self.request
        text = "" if request.hides_completion else output.text
        finish = self._finish(output)
        end = {"logprobs": self._logprobs(index, output), "finish_reason": finish}
        end["stop_reason"] = self._stop_reason(output)
        if request.body.return_token_ids:
            end["token_ids"] = [] if request.hides_completion else list(output.token_ids)
        if request.body.trace:
            end["rounds"] = [] if request.hides_completion else self._rounds(index, output)
        if not request.is_chat:
            echo = request.echoes[index] if is_first and request.echoes else ""
            prompt = self._of_prompt(index, output) if is_first else {}
            return {"index": index, "text": echo + text, **end, **prompt}
        text, calls = self._called(index, text, finish)
        if finish == "stop" and index in self._readers and self._readers[index].num_calls:
            end["finish_reason"] = "tool_calls"
        if request.body.stream:
            delta = {name: new for name, new in (("content", text), ("tool_calls", calls)) if new}
            return {"index": index, "delta": delta, **end}
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            whole = [{name: call[name] for name in call if name != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": whole}
        return {"index": index, "message": message, **end}

    def _called(
        self, index: int, text: str, finish: str | None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the deltas of calls that a piece of an answer adds."""
        if self.request.tools is None:
            return text, []
        name = f"{self.request.response_id}/{index}"
        reader = self._readers.setdefault(index, CallReader(self.request.tools, name))
        return reader.read(text, finish)

    def _rounds(self, index: int, output: Output) -> list[dict[str, Any]]:
        if index not in self._traces:
            prompt_ids = self.request.choices[index].prompt_ids
            self._traces[index] = RunTrace(self.texts.tokenizer, prompt_ids, self.origins)
        return [self._traces[index].round(record) for record in output.records]

    def _of_prompt(self, index: int, output: Output) -> dict[str, Any]:
        """Return tokens of a prompt and their log-probabilities, if requested, as vLLM does."""
        fields, body = dict[str, Any](), self.request.body
        if body.return_token_ids:
            fields["prompt_token_ids"] = list(self.request.choices[index].prompt_ids)
        if body.prompt_logprobs is not None:
            places = ["null"]
            for entry in output.prompt_logprobs or ():
                best = [(rank, *pair) for rank, pair in enumerate(entry.top, start=1)]
                best = [*best[: body.prompt_logprobs], (entry.rank, entry.token_id, entry.logprob)]
                named = {token: self._ranked(rank, token, logprob) for rank, token, logprob in best}
                places.append(f"{{{','.join(named.values())}}}")
            fields["prompt_logprobs"] = Json(f"[{','.join(places)}]")
        return fields

    def _ranked(self, rank: int, token: int, logprob: float) -> str:
        text = json.dumps(self.texts.name(token))
        return f'"{token}":{{"logprob":{_number(logprob)!r},"rank":{rank},"decoded_token":{text}}}'

    def _stop_reason(self, output: Output) -> int | str | None:
        """Return the stop string, or the stop token id, that ends a completion."""
        if output.finish_reason == "stop" and not self.request.hides_completion:
            return output.stop_string
        is_token = output.finish_reason == "eos" and not self.request.hides_completion
        last = output.token_ids[-1] if is_token else None
        return last if last in (self.request.body.stop_token_ids or ()) else None

    def _finish(self, output: Output) -> str | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason not in FINISH:
            cause = None if output.summary is None else output.summary.cause
            error = failure(output.finish_reason, self.request.response_id, cause)
            if error.code == "internal_error":
                _LOG.error("request %s: %s", self.request.response_id, cause, exc_info=cause)
            raise error
        return "length" if self.request.hides_completion else FINISH[output.finish_reason]

    def _logprobs(self, index: int, output: Output) -> dict[str, Any] | None:
        request = self.request.choices[index]
        entries = () if self.request.hides_completion else output.logprobs
        scores = output.prompt_logprobs if self.request.echoes else None
        if request.logprobs is None or not (entries or scores is not None):
            return None
        if self.request.is_chat:
            return self._chat_logprobs(entries)
        given = ()
        if scores is not None:
            given = request.prompt_ids
            scores = [replace(entry, top=entry.top[: request.logprobs.num_top]) for entry in scores]
        last = output.finish_reason is not None
        return self._completion_logprobs(index, [*(scores or ()), *entries], given, last=last)

    def _completion_logprobs(
        self, index: int, entries: Sequence[TokenLogprob], echoed: Sequence[int], *, last: bool
    ) -> dict[str, Any]:
        """Return the lists of `/v1/completions`, an entry for each token; offsets count characters.

        The first token of an echoed prompt has no log-probability.
        """
        num_first = len(echoed[:1])
        prompt_ids = () if self.request.echoes else self.request.choices[index].prompt_ids
        placed = self._placed.setdefault(index, PlacedTexts(self.texts, prompt_ids))
        tokens = [*echoed[:1], *(entry.token_id for entry in entries)]
        texts, offsets = list[str](), list[int]()
        for place, (text, size) in enumerate(placed.of(tokens, last=last), 1):
            texts.append(text)
            offsets.append(self._offsets[index])
            self._offsets[index] += size
            if place == len(echoed):
                self._offsets[index] = len(self.request.echoes[index])
        top = ["null"] * num_first + list(map(self._named, entries))
        logprobs = [_number(entry.logprob) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [None] * num_first + logprobs,
            "top_logprobs": Json(f"[{','.join(top)}]"),
            "text_offset": offsets,
            **self._drawn(index, entries, num_first),
        }

    def _drawn(
        self, index: int, entries: Sequence[TokenLogprob], num_before: int
    ) -> dict[str, dict[str, list[float | None]]]:
        """Return the lists of `drawn`, without numbers for tokens of a prompt."""
        wanted, before = self.request.choices[index].logprobs, [None] * num_before
        if wanted is None or not wanted.drawn:
            return {}
        numbers = [_drawn_numbers(entry) for entry in entries]
        lists = {name: before + [number[name] for number in numbers] for name in _DRAWN}
        return {"drawn": lists}

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the list of `/v1/chat/completions`."""
        content: list[str] = []
        for entry in entries:
            pairs = [(entry.token_id, entry.logprob), *entry.top]
            names = self.texts.names([token for token, _ in pairs])
            token, *top = map(self._described, names, pairs)
            if entry.drawn is not None:
                token += f',"drawn":{json.dumps(_drawn_numbers(entry))}'
            listed = ",".join(f"{{{one}}}" for one in top)
            content.append(f'{{{token},"top_logprobs":[{listed}]}}')
        return {"content": Json(f"[{','.join(content)}]"), "refusal": None}

    def _named(self, entry: TokenLogprob) -> str:
        """Return the most probable tokens and the token itself by name."""
        scores = {entry.token_id: entry.logprob, **dict(entry.top)}
        best = dict(sorted(scores.items(), key=lambda pair: -pair[1]))
        _, *names = map(json.dumps, self.texts.names([entry.token_id, *best]))
        pairs = zip(names, map(_number, best.values()), strict=True)
        return "{" + ",".join(f"{name}:{logprob!r}" for name, logprob in pairs) + "}"

    def _described(self, name: str, scored: tuple[int, float]) -> str:
        token, logprob = scored
        utf8 = json.dumps(self.texts.utf8(token))
        return f'"token":{json.dumps(name)},"logprob":{_number(logprob)!r},"bytes":{utf8}'

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chat = "chat.completion.chunk" if self.request.body.stream else "chat.completion"
        return {
            "id": self.request.response_id,
            "object": chat if self.request.is_chat else "text_completion",
            "created": self.request.created,
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
            "seed": self.request.seed,
            "choices": choices,
        }


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


def _drawn_numbers(entry: TokenLogprob) -> dict[str, float | None]:
    return {name: entry.drawn and _number(getattr(entry.drawn, name)) for name in _DRAWN}


def metrics_of(summary: Summary) -> dict[str, Any]:
    """Return the figures of a completion, in the fields of vLLM's per-request metrics.

    Depth of a tree counts as position, nodes without the root as draft tokens. If nothing can be
    drafted, `speculative_decoding` is `None`.
    """
    spec, count = summary.speculation, summary.num_generated_tokens
    generation_s, num_accepted = summary.total_s - summary.queue_s, spec.num_accepted_tokens
    drafting = {
        "mean_acceptance_length": 1.0 + num_accepted / max(1, spec.num_drafts),
        "draft_acceptance_rate": num_accepted / max(1, spec.num_draft_tokens),
        "acceptance_histogram": list(spec.acceptance_histogram),
        "num_spec_steps": spec.num_drafts,
        "num_accepted_draft_tokens": num_accepted,
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
