"""Fields of requests: bounds, readers, and options that are accepted only with a neutral value."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Final, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

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
MAX_DRAFT: Final = 1024
MAX_LABEL: Final = 512
MAX_GRAMMAR: Final = 1 << 20
MAX_TOOLS: Final = 128
LABELS: Final = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
"""Fields that change nothing, and are accepted by strict servers, too."""
MOST_SHOWN: Final = 5
"""Most errors of a body that an answer spells out."""

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
    """Return prompts as a tuple; each is text or token ids."""
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


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty list of token ids")
    # Built-in functions only: a Python loop over two million numbers takes most of a second.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(
            f"token ids must be integers in 0..{MAX_TOKEN_ID}, and nothing else may "
            "stand beside them"
        )
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    """Return stop strings as a tuple."""
    several: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(several) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings; got {len(several)}")
    if not all(map(is_text, several)):
        raise ValueError("must be text or a list of texts")
    if not all(0 < len(item) <= MAX_STOP_LENGTH for item in several):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return tuple(several)


def few(most: int, least: int | None = None) -> tuple[Any, BeforeValidator]:
    """Bound a list or an object. If it has too many items, it is refused before any is checked."""

    def check(value: Any) -> Any:  # noqa: ANN401 (any JSON)
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"at most {most} items; got {len(value)}")
        return value

    return Field(min_length=least, max_length=most), BeforeValidator(check)


def _few_parts(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Refuse messages, and results of calls, that have too many parts in total."""
    messages: list[Any] = value if isinstance(value, list) else []
    contents = [
        content
        for message in messages
        if isinstance(message, dict)
        for content in (message.get("content"), message.get("output"))
    ]
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


NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
NumNewTokens = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
DraftSize = Annotated[int, Field(ge=0, le=MAX_DRAFT)]
TopK = Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Ignored = Annotated[Label | None, Field(description="A label; it changes nothing.")]
_Ids = Annotated[list[NumTokens], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
_SeveralIds = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_CHOICES)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Prompts = Annotated[
    Any, BeforeValidator(_prompt, json_schema_input_type=str | _Ids | _Texts | _SeveralIds)
]
Stops = Annotated[Any, BeforeValidator(_stop, json_schema_input_type=None | _Stop | _Stops)]
Labels = Annotated[dict[str, str], AfterValidator(_labels), *few(MAX_LABELS)]
Biases = Annotated[dict[str, float], AfterValidator(_bias), *few(MAX_BIASES)]
Settings = Annotated[dict[str, JsonValue], *few(MAX_LABELS)]
Parameters = Annotated[Any, BeforeValidator(_parameters, json_schema_input_type=dict[str, Any])]
Arguments = Annotated[Any, BeforeValidator(_arguments, json_schema_input_type=str)]
StopIds = Annotated[list[NumTokens], *few(MAX_STOP_IDS)]
TokenIds = Annotated[Any, BeforeValidator(_token_ids, json_schema_input_type=_Ids)]
Words = Annotated[list[_Stop], *few(MAX_BAD_WORDS)]
FEW_MESSAGES: Final = Field(fail_fast=True), BeforeValidator(_few_parts), *few(MAX_MESSAGES, 1)


def neutral(why: str, *values: JsonValue) -> Any:  # noqa: ANN401 (as pydantic's own `Field`)
    """Return a field that is accepted only with a value that changes nothing.

    Args:
        why: Reason of the refusal.
        values: Values that change nothing, beside null.
    """
    return Field(
        default=None,
        description=f"Refused unless it asks for nothing: {why}.",
        json_schema_extra={"enum": [None, *values]},
    )


def ignorable(why: str, *values: JsonValue) -> Any:  # noqa: ANN401 (as pydantic's own `Field`)
    """Return a field as `neutral`, which is ignored and noted unless the server is strict."""
    return Field(
        default=None,
        description=f"Ignored, or refused with --strict, unless it asks for nothing: {why}.",
        json_schema_extra={"enum": [None, *values], "ignorable": True},
    )


def optional(description: str | None = None, **bounds: Any) -> Any:  # noqa: ANN401
    """Return a field that may be absent or null."""
    return Field(default=None, description=description, **bounds)


class Strict(BaseModel):
    """Refuses unknown fields, conversions ("1" is no number) and NaN.

    The context of a validation is a set that gets the names of ignored fields. Without a context,
    unknown fields are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, sent: Any, info: Info) -> Any:  # noqa: ANN401 (any JSON)
        """Leave out unknown fields beyond the first few: each of them would become an error.

        Clients of later versions send new fields as null; these are left out too.
        """
        if isinstance(sent, dict) and info.context is not None:
            fields = cls.model_fields
            pairs = sent.items()
            sent = {name: value for name, value in pairs if value is not None or name in fields}
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
        extra: Any = field.json_schema_extra or {}
        allowed = extra.get("enum")
        if value is not None and name in LABELS and info.context is not None:
            info.context.add(name)
        if allowed and not any(_same(value, neutral_value) for neutral_value in allowed):
            if info.context is not None and "ignorable" in extra:
                info.context.add(name)
                return None
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
    "drawn_logprobs": lambda is_on, others: (
        # 0 of `/v1/completions` asks for scores.
        is_on
        and any(others.get("logprobs", True) is value for value in (None, False))
        and "only with logprobs"
    ),
    "prompt_logprobs": lambda _, others: others.get("stream") and "not with stream=true",
    "add_generation_prompt": lambda is_on, others: (
        is_on is bool(others.get("continue_final_message"))
        and "must be the opposite of continue_final_message"
    ),
    "tools": lambda tools, _: len(_names_of(tools)) < len(tools) and "two functions have one name",
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
"""Reasons why a field does not fit an earlier field; fields refused already are absent."""


def _names_of(tools: Any) -> set[str]:  # noqa: ANN401 (of chats, or of responses)
    return {getattr(tool, "function", tool).name for tool in tools}


def _no_such_tool(choice: Any, tools: Any) -> str | None:  # noqa: ANN401 (checked before)
    """Return why a choice of functions cannot be followed, if it cannot."""
    names = _names_of(tools or ())
    if not isinstance(choice, str):
        (name,) = _names_of([choice])
        return None if name in names else f"there is no function {name!r} among the tools"
    return "there are no tools" if choice == "required" and not names else None


def _same(value: object, other: object) -> bool:
    # In Python 1 equals True; in JSON it does not.
    return value == other and isinstance(value, bool) == isinstance(other, bool)
