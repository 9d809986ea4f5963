"""Turns a body into requests of the engine."""

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.engine.chat_format import ChatFormat
from monge.engine.decoder import Decoder
from monge.engine.logprobs import LogprobOptions
from monge.engine.session import Request
from monge.serve.errors import TOO_LONG, refused
from monge.serve.records import Recorder, Recording
from monge.serve.schemas import (
    FIELD_NAMES,
    Asked,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    SpeculationOptions,
)
from monge.serve.settings import ServerSettings

DEFAULT_MAX_TOKENS: Final = 16
"""Default of completions, as in the OpenAI API; the default of a chat answer is the rest of the
context."""

_SAMPLING: Final = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
)
"""Fields that `Decoder.requests` takes as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed HTTP request.

    Args:
        kind: The endpoint.
        response_id: The `id` of the answer.
        created: Seconds since the epoch.
        choices: One request of the engine per choice: all choices of the first prompt, then those
            of the second, and so on.
        num_prompts: Number of prompts.
        asked: Form of the `speculation` field.
        echoes: The text of the prompt for each choice, if it is repeated before the completion;
            else empty.
        is_stream: Whether the answer is a stream.
        has_usage: Whether the stream ends with usage.
        has_running_usage: Whether every chunk has usage.
        hides_completion: Whether the completion is hidden. A request that only scores its prompt
            generates one hidden token.
        recording: How the choices are recorded; `None` records nothing.
    """

    kind: Literal["chat", "completion"]
    response_id: str
    created: int
    choices: tuple[Request, ...]
    num_prompts: int
    asked: Asked
    echoes: tuple[str, ...] = ()
    is_stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    hides_completion: bool = False
    recording: Recording | None = None

    @property
    def seed(self) -> int | None:
        """Seed that reproduces the answer; choice i uses row i. `None` if measured times affect it."""
        first = self.choices[0]
        return first.seed if first.is_repeatable else None

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return len(self.choices) // self.num_prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once."""
        return sum(len(one.prompt_ids) for one in self.choices[:: self.num_choices])

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

    def parse_completion(self, body: CompletionRequest) -> ParsedRequest:
        """Parse a completion request.

        Raises:
            ApiError, MongeError: If it cannot be honoured.
        """
        for prompt in body.prompt:
            self._check_size("prompt", [prompt])
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return self._parsed(
            body,
            "completion",
            body.prompt,
            max(1, wanted),
            logprobs=body.logprobs,
            echoes=[self._text(prompt) for prompt in body.prompt] if body.echo else [],
            hides_completion=wanted == 0,
        )

    def parse_chat(self, body: ChatRequest) -> ParsedRequest:
        """Parse a chat request.

        Raises:
            ApiError, MongeError: If it cannot be honoured.
        """
        self._check_size("messages", [message.text for message in body.messages])
        turns = [{"role": message.role, "content": message.text} for message in body.messages]
        with _fields_named("messages"):
            prompt = self.chat.encode(turns)
        room = self.max_sequence_tokens - len(prompt)
        if room < 1:
            raise refused(
                f"the conversation has {len(prompt)} tokens; with an answer it may have "
                f"{self.max_sequence_tokens}; shorten it",
                "messages",
                TOO_LONG,
            )
        wanted = body.max_completion_tokens or body.max_tokens or room
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._parsed(body, "chat", [prompt], wanted, logprobs=logprobs)

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

    def _parsed(
        self,
        body: SamplingRequest,
        kind: Literal["chat", "completion"],
        prompts: Sequence[str | tuple[int, ...]],
        limit: int,
        *,
        logprobs: int | None,
        echoes: Sequence[str] = (),
        hides_completion: bool = False,
    ) -> ParsedRequest:
        each = body.n or 1
        num_choices, stream = len(prompts) * each, body.stream_options
        if num_choices > self.settings.max_choices:
            raise refused(
                f"this server makes at most {self.settings.max_choices} completions for a "
                f"request; asked for: n={each} for {len(prompts)} prompt(s)",
                "n",
            )
        scores_prompt = bool(echoes) and logprobs is not None
        requests = self._requests(
            body, prompts, limit, logprobs=logprobs, scores_prompt=scores_prompt
        )
        num_prompt_tokens = sum(len(one.prompt_ids) for one in requests)
        self._check_logprobs(
            each * (num_prompt_tokens * scores_prompt + limit * len(requests)), logprobs
        )
        # The choices of a prompt share what they can, and its scores come with the first.
        choices = [
            replace(
                one,
                row=place * each + number,
                prompt_logprobs=None if number else one.prompt_logprobs,
            )
            for place, one in enumerate(requests)
            for number in range(each)
        ]
        return ParsedRequest(
            kind=kind,
            response_id=("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(16),
            created=int(time.time()),
            choices=tuple(choices),
            num_prompts=len(prompts),
            asked=body.asked,
            echoes=tuple(text for text in echoes for _ in range(each)),
            is_stream=bool(body.stream),
            has_usage=stream is not None and bool(stream.include_usage),
            has_running_usage=stream is not None and bool(stream.continuous_usage_stats),
            hides_completion=hides_completion,
            recording=self._recording(num_choices) if body.certificate else None,
        )

    def _requests(
        self,
        body: SamplingRequest,
        prompts: Sequence[str | tuple[int, ...]],
        limit: int,
        *,
        logprobs: int | None,
        scores_prompt: bool,
    ) -> list[Request]:
        """Return one request for each prompt."""
        asked = body.speculation
        drafting = asked if isinstance(asked, SpeculationOptions) else SpeculationOptions()
        self._check_controller(drafting.controller)
        with _fields_named("prompt"):
            requests = self.decoder.requests(
                prompts, max_new_tokens=limit, controller=drafting.controller, **_sampling(body)
            )
        for request in requests:
            self._check_room(request, body)
        # Without candidates, the drafter does not need to read the prompt.
        speculative = asked is not False and 0 not in {drafting.max_depth, drafting.max_nodes}
        adaptive = drafting.adaptive is not False
        scores = None if logprobs is None else LogprobOptions(num_top=logprobs, source="raw")
        return [
            replace(
                request,
                speculative=speculative,
                adaptive=adaptive,
                limits=DraftPlan(max_depth=drafting.max_depth, max_nodes=drafting.max_nodes),
                is_repeatable=request.is_repeatable
                if speculative and adaptive
                else self.decoder.components.coarse_dtype is None,
                logprobs=scores and replace(scores, source=self.settings.logprobs_of),
                prompt_logprobs=scores if scores_prompt else None,
            )
            for request in requests
        ]

    def _check_room(self, request: Request, body: SamplingRequest) -> None:
        num, limit = len(request.prompt_ids), request.max_new_tokens
        if num + limit > self.max_sequence_tokens:
            newer = "max_completion_tokens" in body.model_fields_set
            fields = ("max_tokens", "max_completion_tokens")
            raise refused(
                f"prompt of {num} tokens + max_tokens={limit} exceeds {self.max_sequence_tokens}, "
                "the limit of a request here; shorten the prompt or ask for fewer tokens",
                "prompt" if num >= self.max_sequence_tokens else fields[newer],
                TOO_LONG,
            )

    def _check_logprobs(self, num_tokens: int, logprobs: int | None) -> None:
        num, most = num_tokens * (1 + (logprobs or 0)), self.settings.max_logprobs
        if logprobs is not None and num > most:
            raise refused(
                f"logprobs: choices x tokens x (1 + top log-probabilities) = {num}; this server "
                f"gives at most {most} in an answer; ask for fewer tokens, choices or logprobs",
                "logprobs",
            )

    def _check_controller(self, name: str | None) -> None:
        offered = self.decoder.components.controllers
        if name is not None and name not in offered:
            known = (
                f"there are: {', '.join(offered)}"
                if offered
                else "this server's has no name; leave it out"
            )
            raise refused(
                f"speculation.controller: no such controller here; {known}",
                "speculation.controller",
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

    def _text(self, prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        if self.decoder.tokenizer is None:
            raise refused("echo: this server has no tokenizer, so token ids have no text", "echo")
        return self.decoder.tokenizer.decode(prompt, skip_special_tokens=True)


@contextmanager
def _fields_named(prompt: str) -> Iterator[None]:
    """Add the name of a field to errors of the library, which begin with it unless the prompt is at fault."""
    try:
        yield
    except OptionError as error:
        words = re.findall(r"\w+", str(error))
        raise refused(str(error), words[0] if words[0] in FIELD_NAMES else prompt) from error


def _sampling(body: SamplingRequest) -> dict[str, Any]:
    """Return the options of `Decoder.requests` that the body has."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.top_k is not None and body.top_k > 0:
        given["top_k"] = body.top_k
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    return {"temperature": 1.0, "logit_bias": bias} | given
