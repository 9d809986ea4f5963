"""Turns a body into requests of the engine."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.core.text import token_ids_of
from monge.engine.decoder import Decoder
from monge.engine.session import Request
from monge.options import SamplingOptions, ServeOptions, options_of
from monge.requests.chat_format import TemplateFormat
from monge.requests.logprobs import LogprobOptions
from monge.serve.api.bodies import checked
from monge.serve.api.conversations import Message, NamedTool, Tool
from monge.serve.api.errors import TOO_LONG, ApiError, refused
from monge.serve.api.fields import MAX_DRAFT, MAX_GRAMMAR
from monge.serve.api.schemas import (
    DEFAULTS,
    FIELD_NAMES,
    ChatRequest,
    ChatSettings,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    SamplingRequest,
    SpeculationOptions,
    TextRequest,
    TokensRequest,
)
from monge.serve.api.tools import CallFormat, ToolUse, call_format
from monge.serve.settings import default_sampling

DEFAULT_MAX_TOKENS: Final = 16
_MOST_CHOICES: Final = 128
"""Completions of a request: prompts times n."""
_MOST_SCORES: Final = 1 << 19
"""Log-probabilities of an answer, or most nodes of its trees."""
"""Default of completions, as in the OpenAI API; the default of a chat answer is the rest of the
context."""

Prompt = str | tuple[int, ...]
_IN_RESPONSES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
}
"""Names that `/v1/responses` gives to fields of a chat."""


class UntriedGrammar(Exception):
    """A grammar that must be compiled before a request can be parsed; `param` is its field."""

    def __init__(self, grammar: Grammar, param: str) -> None:
        super().__init__(param)
        self.grammar, self.param = grammar, param


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A body and its requests of the engine.

    Args:
        body: The checked body, without its prompt or its messages.
        original: The body of `/v1/responses` that `body` was made from, without its input.
        response_id: The `id` of the answer.
        created: Seconds since the epoch.
        choices: A request of the engine for each choice: all choices of the first prompt, then
            those of the second, and so on.
        echoes: The text of the prompt for each choice, if it is repeated before the completion;
            else empty.
        tools: The functions that may be called, if any.
    """

    body: CompletionRequest | ChatRequest
    original: ResponsesRequest | None = None
    tools: ToolUse | None = None
    response_id: str
    created: int
    choices: tuple[Request, ...]
    echoes: tuple[str, ...]

    @property
    def is_chat(self) -> bool:
        """True for `/v1/chat/completions`."""
        return isinstance(self.body, ChatRequest)

    @property
    def hides_completion(self) -> bool:
        """True if the request only scores its prompt: it generates a token, which is hidden."""
        return self.body.max_tokens == 0

    @property
    def seed(self) -> int | None:
        """Seed that reproduces the answer; choice i uses row i. `None` if measured times affect it."""
        return self.choices[0].reported_seed

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once."""
        return sum(len(request.prompt_ids) for request in self.choices[:: self.body.n or 1])

    def first_choice(self, index: int) -> int:
        """Index of the first choice of the prompt of a choice; the prompt's scores come with it."""
        return index - index % (self.body.n or 1)


class RequestParser:
    """Parses requests and checks them against the limits of the server.

    Args:
        decoder: Has the tokenizer, the format of conversations and the end-of-text tokens.
        options: Limits.
        max_sequence_tokens: Largest number of tokens of a prompt and its completion.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: ServeOptions,
        *,
        max_sequence_tokens: int,
    ) -> None:
        self._decoder, self._options, self._chat = decoder, options, decoder.chat_format
        self._max_sequence_tokens = max_sequence_tokens
        self._defaults: dict[str, Any] = DEFAULTS | default_sampling(options)
        self._most_new = self._defaults.pop("max_new_tokens", None)
        vocabulary = getattr(decoder.tokenizer, "get_vocab", None)
        self._longest_token = None if vocabulary is None else max(map(len, vocabulary()))

    def parse(
        self,
        content: bytes,
        model: type[TextRequest],
        request_id: str,
        *,
        ignored: set[str] | None = None,
    ) -> ParsedRequest:
        """Parse a body; the id of the answer has that of the request. For `ignored`, see `checked`.

        Raises:
            UntriedGrammar: If its grammar is not compiled yet.
            ApiError, MongeError: If it does not fit the model, or cannot be honoured.
        """
        body = checked(content, model, ignored)
        self.check_name(body.model)
        if not isinstance(body, ResponsesRequest):
            return self._parsed(body, request_id, ignored)
        if ignored is not None:
            ignored.difference_update({"metadata", "user"})  # the answer repeats them
        try:
            parsed = self._parsed(body.as_chat, request_id, ignored)
        except ApiError as error:
            if (name := _IN_RESPONSES.get(error.param or "")) is not None:
                error.message = error.message.replace(str(error.param), name, 1)
                error.param = name
            raise
        original, name = body.model_copy(update={"input": ""}), f"resp_{request_id}"
        return replace(parsed, original=original, response_id=name)

    def _parsed(
        self, body: CompletionRequest | ChatRequest, request_id: str, ignored: set[str] | None
    ) -> ParsedRequest:
        prompts: Sequence[Prompt]
        tools = self._tool_use(body) if isinstance(body, ChatRequest) else None
        self._check_grammar(body, tools)
        if isinstance(body, ChatRequest):
            shown = body.tools or () if tools else ()
            prompts, is_echoed = [self._conversation(body, shown, ignored)], False
            room = self._max_sequence_tokens - len(prompts[0])
            wanted = (
                body.max_completion_tokens or body.max_tokens or min(self._most_new or room, room)
            )
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            prefix = "chatcmpl-"
        else:
            prompts, is_echoed = body.prompt, bool(body.echo)
            for prompt in prompts:
                self._check_size("prompt", [prompt])
            if body.add_special_tokens is False:
                prompts = [self._bare(prompt) for prompt in prompts]
            wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            logprobs, prefix = body.logprobs, "cmpl-"
        each = body.n or 1
        if len(prompts) * each > _MOST_CHOICES:
            raise refused(
                f"this server makes at most {_MOST_CHOICES} completions for a "
                f"request; asked for: n={each} for {len(prompts)} prompt(s)",
                "n",
            )
        requests = self._requests(
            body, prompts, max(1, wanted), tools=tools, logprobs=logprobs, is_echoed=is_echoed
        )
        echoes = (
            map(self._text, body.prompt)
            if isinstance(body, CompletionRequest) and is_echoed
            else ()
        )
        self._check_size_of_answer(requests, each)
        # The choices of a prompt share what they can, and its scores come with the first.
        choices = [
            replace(
                request,
                row=place * each + number,
                prompt_logprobs=None if number else request.prompt_logprobs,
            )
            for place, request in enumerate(requests)
            for number in range(each)
        ]
        # Waiting requests hold no texts, of which there may be megabytes.
        texts = "messages" if isinstance(body, ChatRequest) else "prompt"
        return ParsedRequest(
            body=body.model_copy(update={texts: ()}),
            tools=tools,
            response_id=prefix + request_id,
            created=int(time.time()),
            choices=tuple(choices),
            echoes=tuple(text for text in echoes for _ in range(each)),
        )

    def convert(
        self, content: bytes, model: type[TokensRequest], *, ignored: set[str] | None = None
    ) -> dict[str, Any]:
        """Return the answer to `POST /tokenize` or `POST /detokenize`.

        Raises:
            ApiError, MongeError: As `parse`.
        """
        body = checked(content, model, ignored)
        self.check_name(body.model)
        if isinstance(body, DetokenizeRequest):
            self._check_size("tokens", [body.tokens])
            last = self._decoder.components.target.vocab_size - 1
            if max(body.tokens) > last:
                raise refused(f"tokens: token ids must lie in 0..{last}", "tokens")
            return {"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)}
        tokenizer = self._tokenizer
        if body.messages is not None:
            ids = self._encoded(body, body.messages, body.tools or (), ignored)
        elif body.prompt is not None:
            self._check_size("prompt", [body.prompt])
            is_whole = body.add_special_tokens is not False
            ids = token_ids_of(tokenizer, body.prompt, add_special_tokens=is_whole)
        else:
            raise refused("send prompt or messages", "prompt")
        spelled = tokenizer.convert_ids_to_tokens
        return {
            "count": len(ids),
            "max_model_len": self._max_sequence_tokens,
            "tokens": list(ids),
            "token_strs": [str(spelled(token)) for token in ids]
            if body.return_token_strs
            else None,
        }

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: If `name` is another model.
        """
        served = self._options.served_model_name
        if name not in {None, served}:
            text = f"this server serves {served!r} and nothing else; leave `model` out or send that name"
            raise ApiError(404, text, param="model", code="model_not_found")

    @cached_property
    def _calls(self) -> CallFormat:
        return call_format(self._chat, self._decoder.eos_ids)

    def _tool_use(self, body: ChatRequest) -> ToolUse | None:
        functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
        if not functions or choice == "none":
            return None
        if is_named := isinstance(choice, NamedTool):
            functions = [tool for tool in functions if tool.name == choice.function.name]
        with fields_named("tools", grammar="response_format"):
            answer = body.grammar
        if answer is not None and answer.kind != "json_schema":
            text = "structured_outputs: only json goes with tools; send tool_choice='none' with it"
            raise refused(text, "structured_outputs")
        return ToolUse(
            form=self._calls,
            functions=functions,
            is_required=is_named or choice == "required",
            is_single=is_named or body.parallel_tool_calls is False,
            answer=answer,
        )

    def _check_grammar(self, body: SamplingRequest, tools: ToolUse | None) -> None:
        """Refuse a grammar that is too long or was not tried, before a long prompt is tokenized."""
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        param = param if tools is None else "tools"
        with fields_named(param, grammar=param):
            grammar = body.grammar if tools is None else tools.grammar
            if grammar is None:
                return
            if len(grammar.text) > MAX_GRAMMAR:
                raise OptionError(f"grammar: {len(grammar.text)} characters; at most {MAX_GRAMMAR}")
            if grammar not in self._decoder.grammars:
                raise UntriedGrammar(grammar, param)

    def _encoded(
        self,
        body: ChatSettings,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        ignored: set[str] | None,
    ) -> tuple[int, ...]:
        functions, turns = [tool.told for tool in tools], [message.turn for message in messages]
        self._check_size(
            "messages", [turn.text + (turn.reasoning_content or "") for turn in messages]
        )
        self._check_size("tools", list(map(str, functions)))
        if functions or any({"tool_calls", "tool_call_id"} & turn.keys() for turn in turns):
            turns = self._calls.turns(turns, functions)
        options: dict[str, Any] = {"is_continued": bool(body.continue_final_message)}
        options |= {"tools": functions} if functions and self._calls.has_tools else {}
        given, effort = body.chat_template_kwargs, getattr(body, "reasoning_effort", None)
        is_read = effort is not None and isinstance(self._chat, TemplateFormat)
        settings = {"reasoning_effort": effort} | (given or {}) if is_read else given
        without: dict[str, tuple[Any, Any]] = (
            {} if effort is None else {"reasoning_effort": (turns, given)}
        )
        for field in ("name", "reasoning_content"):
            if any(field in turn and turn["role"] != "tool" for turn in turns):
                bare = [{key: turn[key] for key in turn if key != field} for turn in turns]
                without[field] = bare, settings
        with fields_named("messages"):
            token_ids = self._chat.encode(turns, settings=settings, **options)
            for field, (bare, others) in without.items():
                if token_ids == self._chat.encode(bare, settings=others, **options):
                    if ignored is None:
                        text = f"{field}: the chat template does not read it; leave it out"
                        raise refused(text, field)
                    ignored.add(field)
        return token_ids

    def _conversation(
        self, body: ChatRequest, tools: Sequence[Tool], ignored: set[str] | None
    ) -> tuple[int, ...]:
        prompt = self._encoded(body, body.messages, tools, ignored)
        if len(prompt) >= self._max_sequence_tokens:
            raise refused(
                f"the conversation has {len(prompt)} tokens; with an answer it exceeds the context "
                f"length of {self._max_sequence_tokens} tokens; shorten it",
                "messages",
                TOO_LONG,
            )
        return prompt

    def _check_size(self, param: str, parts: Iterable[Prompt]) -> None:
        """Refuse a text that is too long for any tokenization, before it is tokenized.

        A tokenizer that drops characters, such as repeated blanks, could have produced fewer
        tokens.
        """
        size, most, why = sum(map(len, parts)), self._max_sequence_tokens, ""
        limit = f"the context length of {most} tokens"
        is_text = any(isinstance(part, str) for part in parts)
        if is_text:
            if self._longest_token is None:
                return
            why = f" of up to {self._longest_token} characters"
            most *= self._longest_token
        if size > most:
            what = "characters" if is_text else "tokens"
            text = f"{param}: {size} {what} exceed {limit}{why}; shorten it"
            raise refused(text, param, TOO_LONG)

    def _requests(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        limit: int,
        *,
        tools: ToolUse | None,
        logprobs: int | None,
        is_echoed: bool,
    ) -> list[Request]:
        """Return a request for each prompt."""
        wanted = body.speculation
        drafting = wanted if isinstance(wanted, SpeculationOptions) else SpeculationOptions()
        offered, name = self._decoder.components.controllers, drafting.controller
        if name is not None and name not in offered:
            known = f"there are: {', '.join(offered)}"
            text = f"speculation.controller: no such controller here; {known}"
            raise refused(text, "speculation.controller")
        options: dict[str, Any] = {"max_new_tokens": limit, "controller": name}
        with fields_named("prompt"):
            options |= _sampling(body, self._defaults)
            if tools is not None:
                options["grammar"] = tools.grammar
            requests = self._decoder.requests(prompts, **options)
        requests = [self._fitting(request, body) for request in requests]
        # Without candidates, the drafter does not need to read the prompt.
        speculative = wanted is not False and 0 not in {drafting.max_depth, drafting.max_nodes}
        changes: dict[str, Any] = {
            "speculative": speculative,
            "adaptive": drafting.adaptive is not False,
            "limits": DraftPlan(max_depth=drafting.max_depth, max_nodes=drafting.max_nodes),
            "return_trees": bool(body.trace),
            "cache_salt": body.salt,
        }
        components, rules = self._decoder.components, requests[0].rules
        if not speculative:
            changes["is_repeatable"] = components.coarse_dtype is None
        elif not changes["adaptive"]:
            changes["is_repeatable"] = components.repeats(name, rules, is_planned=False)
        if logprobs is not None:
            source, drawn = self._options.logprobs_of, bool(body.drawn_logprobs)
            changes["logprobs"] = LogprobOptions(num_top=logprobs, source=source, drawn=drawn)
        of_prompt = [body.prompt_logprobs, logprobs if is_echoed else None]
        if numbers := [number for number in of_prompt if number is not None]:
            changes["prompt_logprobs"] = LogprobOptions(num_top=max(numbers), source="raw")
        return [replace(request, **changes) for request in requests]

    def _fitting(self, request: Request, body: SamplingRequest) -> Request:
        """Return the request, if it fits or may be cut."""
        num, limit, most = (
            len(request.prompt_ids),
            request.max_new_tokens,
            self._max_sequence_tokens,
        )
        if num + limit > most:
            if self._options.cut_max_tokens and num + max(1, body.min_tokens or 0) <= most:
                return replace(request, max_new_tokens=most - num)
            is_newer = "max_completion_tokens" in body.model_fields_set
            field = "max_completion_tokens" if is_newer else "max_tokens"
            raise refused(
                f"prompt of {num} tokens + max_tokens={limit} exceeds the context length of {most} "
                "tokens; shorten the prompt or ask for fewer tokens",
                "prompt" if num >= most else field,
                TOO_LONG,
            )
        return request

    def _check_size_of_answer(self, requests: Sequence[Request], each: int) -> None:
        """Refuse a request whose answer has too many log-probabilities, or too many nodes of trees."""
        scored = [(request.logprobs, request.max_new_tokens) for request in requests]
        scored += [(request.prompt_logprobs, len(request.prompt_ids)) for request in requests]
        num_scores = sum(size * scores.num_scores for scores, size in scored if scores)
        most_nodes = self._decoder.components.drafter.capabilities.max_nodes
        widest = MAX_DRAFT if most_nodes is None else most_nodes
        traced = [request for request in requests if request.return_trees]
        num_nodes = sum(row.max_new_tokens * (1 + row.limits.nodes(widest)) for row in traced)
        what = "top log-probabilities", "tokens, choices or logprobs"
        trees = "most nodes of a tree", "tokens or choices, or limit speculation.max_nodes"
        for field, num, (more, less) in (
            ("logprobs", each * num_scores, what),
            ("trace", each * num_nodes, trees),
        ):
            if num > _MOST_SCORES:
                raise refused(
                    f"{field}: choices x tokens x (1 + {more}) = {num}; this server gives at most "
                    f"{_MOST_SCORES} in an answer; ask for fewer {less}",
                    field,
                )

    def _bare(self, prompt: Prompt) -> Prompt:
        """Return a prompt without the special tokens that the tokenizer puts around a text."""
        if not isinstance(prompt, str):
            return prompt
        with fields_named("prompt"):
            return token_ids_of(self._tokenizer, prompt, add_special_tokens=False)

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=True)

    @property
    def _tokenizer(self) -> Any:  # noqa: ANN401 (the host's)
        if self._decoder.tokenizer is None:
            raise refused("this server has no tokenizer, so token ids have no text")
        return self._decoder.tokenizer


@contextmanager
def fields_named(prompt: str, grammar: str = "") -> Iterator[None]:
    """Add the name of a field to errors of the library, which begin with it unless the prompt is at fault."""
    try:
        yield
    except OptionError as error:
        word = re.findall(r"\w+", str(error))[0]
        if grammar and word == "grammar":
            raise refused(f"{grammar}: {str(error).removeprefix('grammar: ')}", grammar) from error
        raise refused(str(error), word if word in FIELD_NAMES else prompt) from error


def _sampling(body: SamplingRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Decoder.requests` that the body has."""
    given = {name: getattr(body, name, None) for name in options_of(SamplingOptions)}
    given["logit_bias"] = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    told = dict(defaults) | {name: value for name, value in given.items() if value is not None}
    if told.get("top_k") in {-1, 0}:
        del told["top_k"]
    return told
