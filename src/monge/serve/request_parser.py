"""Turns an HTTP request into generation requests."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.chat_format import ChatFormat
from monge.engine.decoder import Decoder
from monge.engine.penalties import text_processors
from monge.engine.sampling import Processor
from monge.serve.errors import TOO_LONG, refused
from monge.serve.generation import GenerationRequest
from monge.serve.records import Recorder, Recording
from monge.serve.schemas import ChatRequest, CompletionRequest, SamplingRequest
from monge.serve.settings import ServerSettings

DEFAULT_MAX_TOKENS: Final = 16
"""Default of completions, as in the OpenAI API; the default of a chat answer is the rest of the
context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed HTTP request.

    Args:
        kind: The endpoint.
        response_id: The `id` of the answer.
        created: Seconds since the epoch.
        generations: One generation per choice: all choices of the first prompt, then those of the
            second, and so on.
        num_prompts: Number of prompts.
        seed: Reproduces the request; choice i uses row i of it. `None` if measured times affect the
            text.
        echoes: The text of the prompt for each choice, if it is repeated before the completion;
            else empty.
        is_stream: Whether the answer is a stream.
        has_usage: Whether the stream ends with usage.
        has_running_usage: Whether every chunk has usage.
        hides_completion: Whether the completion is hidden. A request that only scores its prompt
            generates one hidden token.
    """

    kind: Literal["chat", "completion"]
    response_id: str
    created: int
    generations: tuple[GenerationRequest, ...]
    num_prompts: int
    seed: int | None
    echoes: tuple[str, ...] = ()
    is_stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    hides_completion: bool = False

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return len(self.generations) // self.num_prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once."""
        firsts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_ids) for generation in firsts)

    def first_choice(self, index: int) -> int:
        """Index of the first choice of the prompt of a choice; the prompt's scores come with it."""
        return index - index % self.num_choices


@runtime_checkable
class Vocabulary(Protocol):
    """A tokenizer that lists its vocabulary."""

    def get_vocab(self) -> Mapping[str, int]:
        """Token ids by spelling."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParser:
    """Parses requests and checks them against the limits of the server.

    Args:
        decoder: Has the tokenizer, the vocabulary and the end-of-text tokens.
        settings: Limits.
        chat: Formats conversations.
        max_sequence_tokens: Largest number of tokens of a prompt and its completion.
        recorder: Records requests that ask for it; `None` refuses them.
    """

    decoder: Decoder
    settings: ServerSettings
    chat: ChatFormat
    max_sequence_tokens: int
    recorder: Recorder | None = None
    _longest_token: int | None = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.decoder.tokenizer
        longest = (
            max(map(len, tokenizer.get_vocab())) if isinstance(tokenizer, Vocabulary) else None
        )
        object.__setattr__(self, "_longest_token", longest)

    def parse_completion(self, request: CompletionRequest) -> ParsedRequest:
        """Parse a completion request.

        Raises:
            ApiError, MongeError: If it cannot be honoured.
        """
        for prompt in request.prompt:
            self._check_size("prompt", [prompt])
        with _at("prompt"):
            prompts = [self.decoder.encode(prompt) for prompt in request.prompt]
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        limits = [max(1, wanted)] * len(prompts)
        texts = [self._text(prompt) for prompt in request.prompt] if request.echo else []
        return self._order(
            request,
            "completion",
            prompts,
            limits,
            texts=texts,
            logprobs=request.logprobs,
            hides_completion=wanted == 0,
        )

    def parse_chat(self, request: ChatRequest) -> ParsedRequest:
        """Parse a chat request.

        Raises:
            ApiError, MongeError: If it cannot be honoured.
        """
        self._check_size("messages", [message.text for message in request.messages])
        try:
            prompt = self.chat.encode(
                [{"role": message.role, "content": message.text} for message in request.messages]
            )
        except OptionError as error:
            raise refused(str(error), "messages") from error
        room = self.max_sequence_tokens - len(prompt)
        if room < 1:
            raise refused(
                f"the conversation has {len(prompt)} tokens; with an answer it may have "
                f"{self.max_sequence_tokens}; shorten it",
                "messages",
                TOO_LONG,
            )
        wanted = request.max_completion_tokens or request.max_tokens or room
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._order(
            request, "chat", [prompt], [wanted], texts=[], logprobs=logprobs, hides_completion=False
        )

    def _check_size(self, param: str, parts: Iterable[str | tuple[int, ...]]) -> None:
        """Refuse a text that is too long for any tokenization, before it is tokenized.

        A tokenizer that drops characters, such as repeated blanks, could have produced fewer
        tokens.
        """
        size = sum(map(len, parts))
        is_text = any(isinstance(part, str) for part in parts)
        if is_text and self._longest_token is None:
            return
        most = self.max_sequence_tokens * (self._longest_token or 1 if is_text else 1)
        if size > most:
            what = "characters" if is_text else "tokens"
            why = (
                f": {self.max_sequence_tokens} tokens of up to {self._longest_token} characters"
                if is_text
                else ""
            )
            raise refused(
                f"{param}: {size} {what}; this server takes at most {most}{why}; shorten it",
                param,
                TOO_LONG,
            )

    def _order(
        self,
        request: SamplingRequest,
        kind: Literal["chat", "completion"],
        prompts: Sequence[tuple[int, ...]],
        limits: Sequence[int],
        *,
        texts: Sequence[str],
        logprobs: int | None,
        hides_completion: bool,
    ) -> ParsedRequest:
        each = request.n or 1
        if len(prompts) * each > self.settings.max_choices:
            raise refused(
                f"this server makes at most {self.settings.max_choices} completions for a "
                f"request; asked for: n={each} for "
                f"{len(prompts)} prompt(s)",
                "n",
            )
        scores_prompt = bool(texts) and logprobs is not None
        self._check_logprobs(
            each * sum(map(len, prompts)) * scores_prompt + each * sum(limits), logprobs
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        recording = self._recording(len(prompts) * each) if request.certificate else None
        generations: list[GenerationRequest] = []
        for prompt, limit in zip(prompts, limits, strict=True):
            first = self._generation(
                request,
                prompt,
                limit,
                seed,
                len(generations),
                logprobs=logprobs,
                scores_prompt=scores_prompt,
                recording=recording,
            )
            # The choices of a prompt share what they can, and its scores come with the first.
            others = range(first.row + 1, first.row + each)
            generations += [
                first,
                *(replace(first, row=row, prompt_logprobs=None) for row in others),
            ]
        stream = request.stream_options
        return ParsedRequest(
            kind=kind,
            response_id=("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(16),
            created=int(time.time()),
            generations=tuple(generations),
            num_prompts=len(prompts),
            seed=seed if self._repeats(request) else None,
            echoes=tuple(text for text in texts for _ in range(each)),
            is_stream=bool(request.stream),
            has_usage=stream is not None and bool(stream.include_usage),
            has_running_usage=stream is not None and bool(stream.continuous_usage_stats),
            hides_completion=hides_completion,
        )

    def _generation(
        self,
        request: SamplingRequest,
        prompt: tuple[int, ...],
        limit: int,
        seed: int,
        row: int,
        *,
        logprobs: int | None,
        scores_prompt: bool,
        recording: Recording | None,
    ) -> GenerationRequest:
        if not prompt:
            raise refused(
                "the prompt has no tokens; give at least one, for example the "
                "tokenizer's bos token",
                "prompt",
            )
        if len(prompt) + limit > self.max_sequence_tokens:
            older = "max_completion_tokens" not in request.model_fields_set
            raise refused(
                f"prompt of {len(prompt)} tokens + max_tokens={limit} exceeds "
                f"{self.max_sequence_tokens}, the limit "
                "of a request here; shorten the prompt or ask for fewer tokens",
                "prompt"
                if len(prompt) >= self.max_sequence_tokens
                else "max_tokens"
                if older
                else "max_completion_tokens",
                TOO_LONG,
            )
        return GenerationRequest(
            prompt_ids=prompt,
            max_new_tokens=limit,
            rules=_rules(request),
            seed=seed,
            row=row,
            stop=request.stop,
            eos_ids=(end_ids := self._end_ids(request)),
            processors=self._processors(request, len(prompt), limit, end_ids),
            logprobs=logprobs,
            prompt_logprobs=logprobs if scores_prompt else None,
            logprobs_of=self.settings.logprobs_of,
            **self._drafting(request),
            deadline_s=self.settings.request_timeout_s,
            recording=recording,
        )

    def _check_logprobs(self, num_tokens: int, logprobs: int | None) -> None:
        num, most = num_tokens * (1 + (logprobs or 0)), self.settings.max_logprobs
        if logprobs is not None and num > most:
            raise refused(
                f"logprobs: choices x tokens x (1 + top log-probabilities) = {num}; this server "
                f"gives at most {most} in an answer; ask for fewer tokens, choices or logprobs",
                "logprobs",
            )

    def _recording(self, num_choices: int) -> Recording:
        if self.recorder is None:
            raise refused(
                "certificate: this server keeps no records; start it with --certificates",
                "certificate",
            )
        # The choices share the memory of the request.
        max_bytes = self.settings.max_certificate_bytes // num_choices
        return Recording(recorder=self.recorder, max_bytes=max_bytes)

    def _end_ids(self, request: SamplingRequest) -> frozenset[int]:
        vocab_size = self.decoder.components.target.vocab_size
        wrong = [one for one in request.stop_token_ids or () if one >= vocab_size]
        if wrong:
            raise refused(
                f"stop_token_ids: token ids must lie in 0..{vocab_size - 1}; got {wrong[0]}",
                "stop_token_ids",
            )
        own: frozenset[int] = frozenset() if request.ignore_eos else self.decoder.eos_ids
        return own | frozenset(request.stop_token_ids or ())

    def _processors(
        self,
        request: SamplingRequest,
        num_prompt_tokens: int,
        limit: int,
        end_ids: frozenset[int],
    ) -> tuple[Processor, ...]:
        min_tokens = request.min_tokens or 0
        if min_tokens > limit:
            raise refused(
                f"min_tokens={min_tokens} is more than the {limit} tokens of the completion",
                "min_tokens",
            )
        with _at("logit_bias"):  # the schema has checked the others
            return text_processors(
                num_prompt_tokens,
                self.decoder.components.target.vocab_size,
                min_tokens=min_tokens,
                end_ids=end_ids,
                logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
                repetition_penalty=_given(request.repetition_penalty, 1.0),
                presence_penalty=_given(request.presence_penalty, 0.0),
                frequency_penalty=_given(request.frequency_penalty, 0.0),
            )

    def _drafting(self, request: SamplingRequest) -> dict[str, Any]:
        asked = request.speculation
        if asked is None or isinstance(asked, bool):
            return {"speculative": asked is not False, "controller": self._planner(request, None)}
        offered = self.decoder.components.controllers
        if asked.controller is not None and asked.controller not in offered:
            known = (
                f"there are: {', '.join(offered)}"
                if offered
                else "this server's has no name; leave it out"
            )
            raise refused(
                f"speculation.controller: no such controller here; {known}",
                "speculation.controller",
            )
        return {
            # Without candidates, the drafter does not need to read the prompt.
            "speculative": 0 not in {asked.max_depth, asked.max_nodes},
            "adaptive": asked.adaptive is not False,
            "limits": DraftPlan(max_depth=asked.max_depth, max_nodes=asked.max_nodes),
            "controller": self._planner(request, asked.controller),
        }

    def _repeats(self, request: SamplingRequest) -> bool:
        asked = self._drafting(request)
        is_planned = asked["speculative"] and asked.get("adaptive", True)
        return self.decoder.components.repeats(
            asked["controller"], _rules(request), is_planned=is_planned
        )

    def _planner(self, request: SamplingRequest, name: str | None) -> str | None:
        return self.decoder.components.named_for(
            name, _rules(request), is_seeded=request.seed is not None
        )

    def _text(self, prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        if self.decoder.tokenizer is None:
            raise refused("echo: this server has no tokenizer, so token ids have no text", "echo")
        return self.decoder.tokenizer.decode(prompt, skip_special_tokens=True)


@contextmanager
def _at(param: str) -> Iterator[None]:
    """Add the name of the field to errors of the library."""
    try:
        yield
    except OptionError as error:
        raise refused(str(error), param) from error


def _rules(request: SamplingRequest) -> SamplingRules:
    return SamplingRules(
        temperature=_given(request.temperature, 1.0),
        top_k=request.top_k if request.top_k is not None and request.top_k > 0 else None,
        top_p=_given(request.top_p, 1.0),
        min_p=_given(request.min_p, 0.0),
    )


def _given(value: float | None, absent: float) -> float:
    return absent if value is None else value
