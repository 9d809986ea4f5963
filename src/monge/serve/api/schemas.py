"""Bodies of requests: every field is honoured, or neutral, or refused with its reason.

Unknown fields are refused.
"""

import json
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from monge.core.errors import OptionError
from monge.core.grammar import Grammar

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1000
MAX_STOP_IDS: Final = 64
MAX_BAD_WORDS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
MAX_LABELS: Final = 16
MAX_MESSAGES: Final = 2048
MAX_TOKEN_ID: Final = (1 << 31) - 1
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 64) - 1
MAX_DRAFT: Final = 1024
MAX_LABEL: Final = 512
MAX_GRAMMAR: Final = 1 << 16
MAX_TOOLS: Final = 128
MOST_SHOWN: Final = 5
"""Errors of one body that are spelled out."""

Asked = Literal["default", "options", "off"]
"""Forms of the `speculation` field: absent or true, an object, or false."""

Info = Any
"""Pydantic's `ValidationInfo`, a protocol that cannot be checked at run time."""


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a string.

    Raises:
        ValueError: If it is a string without a UTF-8 form, which no tokenizer can read.
    """
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is half of a surrogate pair, which is no text; "
            "send the whole character"
        ) from error
    return True


def _prompt(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Turn one prompt or several, each text or token ids, into a list."""
    if is_text(value):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, a list of token ids, or a non-empty list of either")
    if isinstance(value[0], int):
        return (_token_ids(value),)
    if len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} prompts in a request; got {len(value)}")
    if all(map(is_text, value)):
        return tuple(value)
    if all(isinstance(item, list) and item for item in value):
        return tuple(map(_token_ids, value))
    raise ValueError("must hold texts only, or non-empty lists of token ids only")


def _token_ids(value: list[Any]) -> tuple[int, ...]:
    # Built-in functions only: a Python loop over two million numbers takes most of a second.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(
            f"token ids must be integers in 0..{MAX_TOKEN_ID}, and nothing else may "
            "stand beside them"
        )
    return tuple(value)


def _some_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty list of token ids")
    return _token_ids(value)


def _stop(value: object) -> tuple[str, ...]:
    """Turn no stop string, one, or several into a tuple."""
    several: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(several) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings; got {len(several)}")
    if not all(map(is_text, several)):
        raise ValueError("must be text or a list of texts")
    if not all(0 < len(item) <= MAX_STOP_LENGTH for item in several):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return tuple(several)


def at_most(most: int) -> BeforeValidator:
    """Refuse a list or an object with too many items before any item is checked."""

    def check(value: Any) -> Any:  # noqa: ANN401 (any JSON)
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"at most {most} items; got {len(value)}")
        return value

    return BeforeValidator(check)


def few_parts(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Refuse messages that have too many parts in total."""
    messages: list[Any] = value if isinstance(value, list) else []
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} parts in all messages together; got {num_parts}")
    return value


def _bias(value: dict[str, float]) -> dict[str, float]:
    longest = len(str(MAX_TOKEN_ID))
    if not all(key.isascii() and key.isdigit() and len(key) <= longest for key in value):
        raise ValueError("keys must be token ids")
    if not all(-100 <= bias <= 100 for bias in value.values()):
        raise ValueError("a bias lies in -100..100")
    return value


def _arguments(value: object) -> dict[str, Any]:
    """Read the arguments of a call; some clients send no text for none."""
    try:
        found = json.loads(value or "{}") if is_text(value) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be the text of a JSON object")  # noqa: TRY004 (what pydantic reads)
    return found


def _parameters(value: object) -> dict[str, Any]:
    """Turn the schema of arguments, or none, into that of an object."""
    schema = {"properties": {}} if value is None else value
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of type object")
    return {"type": "object"} | schema


def _labels(value: dict[str, str]) -> dict[str, str]:
    for pair in value.items():
        all(map(is_text, pair))
    return value


def _array(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items} | bounds


_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS = [{"type": "null"}, _STOP_TEXT, _array(_STOP_TEXT, maxItems=MAX_STOPS)]
_IDS = _array({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, minItems=1)
_SEVERAL = [_array(one, minItems=1, maxItems=MAX_CHOICES) for one in ({"type": "string"}, _IDS)]
_PROMPTS = [{"type": "string"}, _IDS, *_SEVERAL]

Prompts = Annotated[Any, AfterValidator(_prompt), WithJsonSchema({"anyOf": _PROMPTS})]
Stops = Annotated[Any, AfterValidator(_stop), WithJsonSchema({"anyOf": _STOPS})]
NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_FEW_LABELS = Field(max_length=MAX_LABELS), at_most(MAX_LABELS)
_FEW_BIASES = Field(max_length=MAX_BIASES), at_most(MAX_BIASES)
Labels = Annotated[dict[str, str], AfterValidator(_labels), *_FEW_LABELS]
Biases = Annotated[dict[str, float], AfterValidator(_bias), *_FEW_BIASES]
Parameters = Annotated[Any, AfterValidator(_parameters), WithJsonSchema({"type": "object"})]
Arguments = Annotated[Any, AfterValidator(_arguments), WithJsonSchema({"type": "string"})]
StopIds = Annotated[list[NumTokens], Field(max_length=MAX_STOP_IDS), at_most(MAX_STOP_IDS)]
TokenIds = Annotated[Any, AfterValidator(_some_ids), WithJsonSchema(_IDS)]
_WORD = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Words = Annotated[list[_WORD], Field(max_length=MAX_BAD_WORDS), at_most(MAX_BAD_WORDS)]
Settings = Annotated[dict[str, JsonValue], *_FEW_LABELS]


def neutral(why: str, *values: JsonValue) -> Any:  # noqa: ANN401 (as pydantic's own `Field`)
    """Return a field that is accepted if it asks for nothing, and refused otherwise.

    Args:
        why: Reason of the refusal.
        values: Values that ask for nothing, beside null.
    """
    return Field(
        default=None,
        description=f"Refused unless it asks for nothing: {why}.",
        json_schema_extra={"enum": [None, *values]},
    )


def optional(description: str | None = None, **bounds: Any) -> Any:  # noqa: ANN401
    """Return a field that may be absent or null."""
    return Field(default=None, description=description, **bounds)


def label() -> Any:  # noqa: ANN401
    """Return a field for a name that clients give to their requests; it changes nothing."""
    return optional("A label; it changes nothing.", max_length=MAX_LABEL)


class _Strict(BaseModel):
    """Refuses unknown fields, conversions ("1" is no number) and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, sent: Any) -> Any:  # noqa: ANN401 (any JSON)
        """Leave out unknown fields beyond the first few: every one would become an error."""
        if not isinstance(sent, dict) or len(sent) <= len(cls.model_fields):
            return sent
        known = [name for name in cls.model_fields if name in sent]
        unknown = islice((name for name in sent if name not in cls.model_fields), MOST_SHOWN + 1)
        return {name: sent[name] for name in (*known, *unknown)}

    @field_validator("*")
    @classmethod
    def _can_be_honoured(cls, value: object, info: Info) -> object:
        is_text(value)  # raises if it is text that no tokenizer reads
        name, field = str(info.field_name), cls.model_fields[str(info.field_name)]
        allowed: Any = field.json_schema_extra and field.json_schema_extra["enum"]  # pyright: ignore[reportIndexIssue]
        if allowed and not any(_same(value, one) for one in allowed):
            why = str(field.description).partition(": ")[2].removesuffix(".")
            raise ValueError(f"{why}; leave it out or send {' or '.join(map(json.dumps, allowed))}")
        if value is not None and name in _CONFLICTS and (why := _CONFLICTS[name](value, info.data)):
            raise ValueError(why)
        return value


_CONFLICTS: Final[dict[str, Callable[[Any, dict[str, Any]], Any]]] = {
    "stream_options": lambda _, others: not others.get("stream", True) and "only with stream=true",
    "top_logprobs": lambda _, others: (
        not others.get("logprobs", True) and "only with logprobs=true"
    ),
    "certificate": lambda is_on, others: (
        is_on and others.get("stream") and "a stream carries none; leave stream out"
    ),
    "prompt_logprobs": lambda _, others: others.get("stream") and "not with stream=true",
    "add_generation_prompt": lambda is_on, others: (
        is_on is bool(others.get("continue_final_message"))
        and "must be the opposite of continue_final_message"
    ),
    "tools": lambda tools, _: (
        len({tool.function.name for tool in tools}) < len(tools) and "two functions have one name"
    ),
    "tool_choice": lambda choice, others: (
        "tools" in others and _no_such_tool(choice, others["tools"])
    ),
    "prompt": lambda _, others: (
        (others.get("messages") or others.get("tools")) and "send it or messages"
    ),
    "controller": lambda _, others: (
        others.get("adaptive") is False and "adaptive=false asks for none; send one of them"
    ),
    "max_tokens": lambda number, others: (
        others.get("max_completion_tokens") not in {None, number}
        and "differs from max_completion_tokens; send one of them"
    ),
}
"""Reasons why a field does not fit an earlier one; one that was refused for itself is absent."""


def _no_such_tool(choice: Any, tools: Any) -> str | None:  # noqa: ANN401 (checked before)
    """Return why a choice of functions cannot be followed, if it cannot."""
    names = [tool.function.name for tool in tools or ()]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return None if name in names else f"there is no function {name!r} among the tools"
    return "there are no tools" if choice == "required" and not names else None


def _same(value: object, other: object) -> bool:
    # In Python 1 equals True; in JSON it does not.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class SpeculationOptions(_Strict):
    """Options of drafting for one request, within those of the server."""

    max_depth: int | None = optional("Most tokens along a path; 0 is none.", ge=0, le=MAX_DRAFT)
    max_nodes: int | None = optional("Most tokens on all paths; 0 is none.", ge=0, le=MAX_DRAFT)
    adaptive: bool | None = optional("false drafts the largest tree within the limits.")
    controller: str | None = optional("The controller; absent, the first.", max_length=MAX_LABEL)


class StreamOptions(_Strict):
    """Parts of a stream beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = neutral("chunks are not padded", False)


Speculation = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[SpeculationOptions, Tag("options")],
    # Or errors would speak of both.
    Discriminator(
        lambda value: "options" if isinstance(value, dict | SpeculationOptions) else "switch"
    ),
]


class JsonSchemaFormat(_Strict):
    """The schema of a response format."""

    # `schema` is a method of pydantic's models, so the field has another name here.
    value: dict[str, Any] = Field(alias="schema")
    name: str | None = label()
    description: str | None = optional("Changes nothing.")
    strict: bool | None = optional("The schema is always followed.")


class ResponseFormat(_Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """Forms of a completion, as vLLM names them; a request sends one of the first five fields."""

    value: dict[str, Any] | str | None = Field(default=None, alias="json", description="A schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = optional("Rules in the notation of Lark, or in GBNF.")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = optional(
        "false leaves the whitespace of JSON to the model; absent means true."
    )


class SamplingRequest(_Strict):
    """Fields of both endpoints."""

    model: str | None = optional("The served model; it may be left out.")
    temperature: float | None = optional("0 decodes greedily; absent means 1.", ge=0)
    top_p: float | None = optional(gt=0, le=1)
    top_k: int | None = optional("-1 and 0 keep all tokens.", ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = optional(ge=0, le=1)
    presence_penalty: float | None = optional(ge=-2, le=2)
    frequency_penalty: float | None = optional(ge=-2, le=2)
    repetition_penalty: float | None = optional(ge=0.01, le=10)
    logit_bias: Biases | None = None
    seed: int | None = optional(
        "Drawn if absent; returned if it gives the text again.", ge=MIN_SEED, le=MAX_SEED
    )
    stop: Stops = Field(default=(), description="Texts before which the completion ends.")
    stop_token_ids: StopIds | None = optional("End the completion, as the model's own do.")
    min_tokens: NumTokens | None = optional("Fewest tokens before one that ends the completion.")
    allowed_token_ids: TokenIds | None = optional("The only tokens that may come.")
    bad_words: Words | None = optional("Words whose tokens may not come in their order.")
    n: int | None = optional(ge=1, le=MAX_CHOICES)
    ignore_eos: bool | None = None
    speculation: Speculation | None = optional("Whether to draft, or how; absent means true.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = optional("Return the tokens of prompt and completion.")
    prompt_logprobs: int | None = optional(
        "Log-probabilities of the prompt: so many of the most probable tokens at each place.",
        ge=0,
        le=MAX_LOGPROBS,
    )
    certificate: bool | None = optional("Return the record of the rounds, for `monge certify`.")
    trace: bool | None = optional("Return the trees of the rounds, as the page shows them.")
    user: str | None = label()
    best_of: Any = neutral("completions are not ranked against each other", 1)
    use_beam_search: Any = neutral("beams are not searched", False)
    length_penalty: Any = neutral("beams are not searched", 1.0)
    include_stop_str_in_output: Any = neutral("text ends before a stop string", False)
    skip_special_tokens: Any = neutral("special tokens are not written out", True)
    spaces_between_special_tokens: Any = neutral("special tokens are not written out", True)
    truncate_prompt_tokens: Any = neutral("prompts are not cut")
    response_format: ResponseFormat | None = optional("Absent means text.")
    structured_outputs: StructuredOutputs | None = None
    priority: Any = neutral("requests are served in their order", 0)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the completion.

        Raises:
            OptionError: If it is asked for twice, in no way, or in a malformed one.
        """
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            if outputs is not None:
                raise OptionError("structured_outputs: response_format is sent too; send one")
            if form.type == "json_object":
                return Grammar.json_object()
            if form.json_schema is None:
                raise OptionError("response_format: json_schema is missing")
            return Grammar.json_schema(form.json_schema.value)
        if outputs is None:
            return None
        spaces = outputs.disable_any_whitespace is False
        makers: dict[str, Callable[[Any], Grammar]] = {
            "value": lambda schema: Grammar.json_schema(schema, any_whitespace=spaces),
            "regex": Grammar.regex,
            "choice": Grammar.choice,
            "grammar": Grammar.ebnf,
            "json_object": lambda _: Grammar.json_object(any_whitespace=spaces),
        }
        sent = {name: getattr(outputs, name) for name in makers}
        given = [name for name, value in sent.items() if value is not None and value is not False]
        if len(given) != 1:
            known = "json, regex, choice, grammar, json_object"
            raise OptionError(f"structured_outputs: send one of {known}; got {len(given)}")
        return makers[given[0]](sent[given[0]])

    @property
    def asked(self) -> Asked:
        """Form of the `speculation` field."""
        if isinstance(self.speculation, SpeculationOptions):
            return "options"
        return "off" if self.speculation is False else "default"


class CompletionRequest(SamplingRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompts = Field(description="Text or token ids, or a list of either.")
    max_tokens: NumTokens | None = optional("Absent means 16.")
    logprobs: int | None = optional(ge=0, le=MAX_LOGPROBS)
    echo: bool | None = optional("Put the prompt before the completion.")
    suffix: Any = neutral("text cannot be written before a given end", "")
    add_special_tokens: Any = neutral("the tokenizer's own rule holds", True)


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Any = neutral("there are no annotations", [])
    logprobs: Any = neutral("earlier answers are not scored", [])


_FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(_Strict):
    """The function of a call and its arguments."""

    name: _FunctionName
    arguments: Arguments = Field(description="The text of a JSON object.")


class ToolCall(_Strict):
    """A call in an earlier answer."""

    id: str = Field(max_length=MAX_LABEL)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = optional("Changes nothing.")


class Message(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = optional(
        "Calls of an earlier answer."
    )
    tool_call_id: str | None = Field(default=None, max_length=MAX_LABEL, validate_default=True)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        default=None, description="May be null beside tool_calls.", validate_default=True
    )
    name: str | None = optional(
        "Of a participant, if the template writes it.", max_length=MAX_LABEL
    )
    function_call: Any = neutral("send tool_calls")
    refusal: Any = neutral("there are no refusals")
    annotations: Any = neutral("there are no annotations", [])
    audio: Any = neutral("messages are text")
    type: Any = neutral("messages are text", "text", "message")
    id: str | None = label()
    status: str | None = label()

    @property
    def text(self) -> str:
        """Return the whole text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def turn(self) -> dict[str, Any]:
        """Return the turn as templates take it."""
        fields: Any = {"role": True, "name": True, "tool_call_id": True}
        fields["tool_calls"] = {"__all__": {"id", "type", "function"}}
        return self.model_dump(include=fields, exclude_none=True) | {"content": self.text}

    @field_validator("tool_calls", "tool_call_id", "content")
    @classmethod
    def _fits_the_role(cls, value: Any, info: Info) -> Any:  # noqa: ANN401 (as it is)
        name, role = info.field_name, info.data.get("role")
        if name == "tool_calls" and value and role != "assistant":
            raise ValueError("only of role assistant")
        if name == "tool_call_id" and role and (role == "tool") != (value is not None):
            raise ValueError("belongs to role tool, which needs it")
        if name == "content" and value is None and not info.data.get("tool_calls"):
            raise ValueError("required, unless there are tool_calls")
        return None if value == [] else value


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
    at_most(MAX_MESSAGES),
]


class Function(_Strict):
    """A function that may be called."""

    name: _FunctionName
    description: str | None = None
    parameters: Parameters = Field(
        default=None, description="Absent means none.", validate_default=True
    )
    strict: bool | None = optional("Whether arguments always follow the schema.")


class Tool(_Strict):
    """A function that may be called."""

    type: Literal["function"]
    function: Function

    @property
    def told(self) -> dict[str, Any]:
        """Return the function as templates take it."""
        return self.model_dump(exclude={"function": {"strict"}}, exclude_none=True)


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS)]


class FunctionName(_Strict):
    """The name of a function."""

    name: str = Field(max_length=MAX_LABEL)


class NamedTool(_Strict):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")],
    Discriminator(lambda value: "named" if isinstance(value, dict | NamedTool) else "word"),
]


class ChatSettings(_Strict):
    """Fields about the template of a conversation."""

    chat_template_kwargs: Settings | None = optional("Variables of the chat template.")
    continue_final_message: bool | None = optional(
        "Whether the last message is the start of the answer."
    )
    add_generation_prompt: bool | None = optional("The opposite of continue_final_message.")


class ChatRequest(SamplingRequest, ChatSettings):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = optional(ge=1, le=MAX_TOKEN_ID)
    max_tokens: int | None = optional("The older name.", ge=1, le=MAX_TOKEN_ID)
    logprobs: bool | None = None
    top_logprobs: int | None = optional(ge=0, le=MAX_LOGPROBS)
    safety_identifier: str | None = label()
    prompt_cache_key: str | None = label()
    metadata: Labels | None = optional("Labels; they change nothing.")
    tools: Tools | None = optional("Functions that may be called.")
    tool_choice: ToolChoice | None = optional("Absent means auto.")
    parallel_tool_calls: bool | None = optional("false allows one call in an answer.")
    functions: Any = neutral("send tools", [])
    function_call: Any = neutral("send tool_choice", "none", "auto")
    modalities: Any = neutral("answers are text", ["text"])
    audio: Any = neutral("answers are text")
    prediction: Any = neutral("drafts come from the server's drafter")
    reasoning_effort: Any = neutral("there is no switch for reasoning")
    verbosity: Any = neutral("there is no switch for verbosity")
    service_tier: Any = neutral("there is one tier", "auto", "default")
    store: Any = neutral("nothing is stored", False)
    web_search_options: Any = neutral("nothing is searched")
    chat_template: Any = neutral("templates come from the server, never from a request")
    add_special_tokens: Any = neutral("the template writes them", False)


class TextFormat(_Strict):
    """The form of the text of a response: a `ResponseFormat` without its inner object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    value: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = label()
    description: str | None = optional("Changes nothing.")
    strict: bool | None = optional("The schema is always followed.")

    @property
    def of_chat(self) -> ResponseFormat:
        """The same form of a chat answer."""
        schema = None if self.value is None else JsonSchemaFormat.model_construct(value=self.value)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(_Strict):
    """Options of the text of a response."""

    format: TextFormat | None = None
    verbosity: Any = neutral("there is no switch for lengths", "medium")


class ResponsesRequest(SamplingRequest, ChatSettings):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[Messages, Tag("messages")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "messages"),
    ]
    instructions: str | None = optional("A system message before the input.")
    max_output_tokens: int | None = optional(ge=1, le=MAX_TOKEN_ID)
    stream_options: Any = neutral("chunks are not padded", {}, {"include_obfuscation": False})
    safety_identifier: str | None = label()
    prompt_cache_key: str | None = label()
    metadata: Labels | None = optional("Labels; they change nothing.")
    n: Any = neutral("a response has one text", 1)
    certificate: Any = neutral("a response carries no record", False)
    trace: Any = neutral("a response carries no trees", False)
    return_token_ids: Any = neutral("a response carries no token ids", False)
    prompt_logprobs: Any = neutral("a response carries no scores")
    top_logprobs: Any = neutral("a response carries no scores", 0)
    include: Any = neutral("nothing is added", [])
    background: Any = neutral("answers are not kept", False)
    store: Any = neutral("answers are not kept", False)
    previous_response_id: Any = neutral("answers are not kept; send the conversation")
    conversation: Any = neutral("conversations are not kept; send the messages")
    prompt: Any = neutral("there are no stored prompts")
    text: TextOptions | None = None
    response_format: Any = neutral("the form of a response is its `text.format`")
    reasoning: Any = neutral("there is no switch for reasoning", {})
    service_tier: Any = neutral("there is one tier", "auto", "default")
    truncation: Any = neutral("conversations are not cut", "disabled")
    tools: Any = neutral("tools are not called", [])
    tool_choice: Any = neutral("tools are not called", "none", "auto")
    parallel_tool_calls: Any = neutral("tools are not called", True, False)
    max_tool_calls: Any = neutral("tools are not called")

    @property
    def as_chat(self) -> ChatRequest:
        """The chat request for the same text."""
        turns = (
            [Message(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        if self.instructions is not None:
            turns = [Message(role="system", content=self.instructions), *turns]
        shared = self.model_fields_set & ChatRequest.model_fields.keys() - {"stream_options"}
        fields = {name: getattr(self, name) for name in shared}
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.of_chat
        return ChatRequest.model_construct(messages=turns, **fields)


class TokenizeRequest(ChatSettings):
    """Body of `POST /tokenize`."""

    model: str | None = optional("The served model; it may be left out.")
    messages: Messages | None = optional("A conversation.")
    tools: Tools | None = optional("Functions that may be called.")
    prompt: str | None = optional("Or a text.")
    add_special_tokens: bool | None = optional("Those around a text; absent means true.")
    return_token_strs: bool | None = optional("Return tokens as the tokenizer spells them, too.")


class DetokenizeRequest(_Strict):
    """Body of `POST /detokenize`."""

    model: str | None = optional("The served model; it may be left out.")
    tokens: TokenIds


FIELD_NAMES: Final = frozenset(
    name
    for model in (
        *(CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, StreamOptions),
        *_Strict.__subclasses__(),
    )
    for name in model.model_fields
)
"""Names of all fields at any depth. Other words in the place of an error name branches of a union."""
