"""Request fields that have more than one form, and their checks."""

from typing import Annotated, Any, Final, TypeGuard, cast

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1000
MAX_STOP_IDS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
MAX_LABELS: Final = 16
MAX_MESSAGES: Final = 2048
MAX_TOKEN_ID: Final = (1 << 31) - 1
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 64) - 1

_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TEXT = {"type": "string"}


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

    def check(value: object) -> object:
        if (
            isinstance(value, list | dict)
            and len(cast("list[object] | dict[str, object]", value)) > most
        ):
            raise ValueError(
                f"at most {most} items; got {len(cast('list[object] | dict[str, object]', value))}"
            )
        return cast(object, value)

    return BeforeValidator(check)


def few_parts(value: object) -> object:
    """Refuse messages that have too many parts in total."""
    messages = (
        [one for one in cast("list[object]", value) if isinstance(one, dict)]
        if isinstance(value, list)
        else []
    )
    contents = [cast("dict[str, object]", one).get("content") for one in messages]
    num_parts = sum(
        len(cast("list[object]", content)) for content in contents if isinstance(content, list)
    )
    if num_parts > MAX_MESSAGES:
        raise ValueError(f"at most {MAX_MESSAGES} parts in all messages together; got {num_parts}")
    return value


def _bias(value: dict[str, float]) -> dict[str, float]:
    if not all(
        key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN_ID)) for key in value
    ):
        raise ValueError("keys must be token ids")
    if not all(-100 <= bias <= 100 for bias in value.values()):
        raise ValueError("a bias lies in -100..100")
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    for pair in value.items():
        all(map(is_text, pair))
    return value


_LIST_OF_IDS = {"type": "array", "items": _ID, "minItems": 1}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        _LIST_OF_IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _LIST_OF_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ]
}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS},
    ]
}

Prompts = Annotated[Any, AfterValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[Any, AfterValidator(_stop), WithJsonSchema(_STOP_SCHEMA)]
Labels = Annotated[
    dict[str, str], AfterValidator(_labels), Field(max_length=MAX_LABELS), at_most(MAX_LABELS)
]
Biases = Annotated[
    dict[str, float], AfterValidator(_bias), Field(max_length=MAX_BIASES), at_most(MAX_BIASES)
]
StopIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(max_length=MAX_STOP_IDS),
    at_most(MAX_STOP_IDS),
]
NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
