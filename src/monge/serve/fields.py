"""Fields of requests that take more than one form: their checks, and what clients are told of them."""

from typing import Annotated, Any, Final, TypeGuard

from pydantic import AfterValidator, Field, WithJsonSchema

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 1000
MAX_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
MAX_TOKEN_ID: Final = (1 << 31) - 1
MIN_SEED: Final = -(1 << 63)
MAX_SEED: Final = (1 << 64) - 1

_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TEXT = {"type": "string"}


def _is_text(value: object) -> TypeGuard[str]:
    """Whether a value is a string that has a UTF-8 form; JSON can spell halves of surrogate pairs, which have none."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _prompt(value: object) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids, as several."""
    if _is_text(value):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, a list of token ids, or a non-empty list of either")
    if all(isinstance(item, int) for item in value):
        return (_token_ids(value),)
    if len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} prompts in a request; got {len(value)}")
    if all(map(_is_text, value)):
        return tuple(value)
    if all(isinstance(item, list) and item for item in value):
        return tuple(map(_token_ids, value))
    raise ValueError("must hold texts only, or non-empty lists of token ids only")


def _token_ids(value: list[Any]) -> tuple[int, ...]:
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise ValueError("token ids must be integers from 0 on")
    return tuple(value)


def _stop(value: object) -> tuple[str, ...]:
    """No stop string, one or several, as several."""
    several: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(_is_text, several)):
        raise ValueError("must be text or a list of texts")
    if len(several) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings; got {len(several)}")
    if not all(0 < len(item) <= MAX_STOP_LENGTH for item in several):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return tuple(several)


def _bias(value: dict[str, float]) -> dict[str, float]:
    if not all(key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN_ID)) for key in value):
        raise ValueError("keys must be token ids")
    if not all(-100 <= bias <= 100 for bias in value.values()):
        raise ValueError("a bias lies in -100..100")
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
    "anyOf": [{"type": "null"}, _STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]
}

Prompts = Annotated[Any, AfterValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[Any, AfterValidator(_stop), WithJsonSchema(_STOP_SCHEMA)]
Biases = Annotated[dict[str, float], AfterValidator(_bias), Field(max_length=MAX_BIASES)]
NumTokens = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
