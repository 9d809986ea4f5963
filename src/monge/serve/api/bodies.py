"""Bodies of requests: from bytes to checked fields."""

import email.message
import gc
import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from monge.serve.api.errors import of_validation, refused
from monge.serve.api.fields import MAX_MESSAGES

MAX_STRINGS: Final = 32 * MAX_MESSAGES
"""Largest number of names and texts of a body, and of its lists and objects.

A message has nine fields, and a part has two.
"""

MAX_ITEMS: Final = 1 << 19
"""Largest number of items in all lists and objects of a body, mostly token ids."""

_FIRST_GAP: Final = float(1 << 53)
"""Above it, a float does not say which integer was written."""
_UNREADABLE: Final = (
    "the body cannot be read; JSON in UTF-8 is expected, without absurd numbers or nesting"
)
_TEXT: Final = re.compile(rb'"[^"]*"?')

Model = TypeVar("Model", bound=BaseModel)


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not plain JSON by its headers.

    Browsers send no other site a body that declares JSON, unless that site allows it.

    Raises:
        ApiError: With the header, and with what it may be.
    """
    declared, coding = headers.get("content-type"), headers.get("content-encoding", "identity")
    message = email.message.Message()
    message["content-type"] = declared or ""
    kind, subtype = message.get_content_maintype(), message.get_content_subtype()
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        got = "has no content-type" if declared is None else f"has content-type {declared[:60]!r}"
        text = f"the request {got}; send JSON with content-type application/json"
        raise refused(text, code="invalid_content_type")
    if coding.strip().lower() != "identity":
        text = f"content-encoding {coding[:60]!r} is not supported; send the body uncompressed"
        raise refused(text, code="invalid_content_encoding")


def checked(content: bytes, model: type[Model], ignored: set[str] | None = None) -> Model:
    """Return a checked body; `ignored` gets the names of ignored fields, and `None` refuses them.

    Raises:
        ApiError: If it is not JSON in UTF-8, or does not fit the model.
    """
    if not content:
        raise refused("the body is empty; send a JSON object")
    try:
        return model.model_validate(_fields(content), context=ignored)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False)) from error


def _fields(content: bytes) -> Any:  # noqa: ANN401 (any JSON)
    # The JSON parser would take UTF-16 and UTF-32 too, and the scan would not see through them.
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(_UNREADABLE, code="invalid_json") from error
    _check_counts(content)
    was_on = gc.isenabled()
    gc.disable()  # a parser makes no garbage, and each collection would visit a million lists
    try:
        return json.loads(text, parse_float=_number)
    except json.JSONDecodeError as error:
        text = f"the body is not JSON: {error.msg} at position {error.pos}"
        raise refused(text, code="invalid_json") from error
    # Integers of thousands of digits; thousands of brackets.
    except (ValueError, RecursionError) as error:
        raise refused(_UNREADABLE, code="invalid_json") from error
    finally:
        if was_on:
            gc.enable()


def _number(text: str) -> float | int:
    """Return a number; JSON has a single type of numbers, and some clients write 16.0 for 16."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _FIRST_GAP else value


def _check_counts(content: bytes) -> None:
    """Refuse a body that takes long to parse, since nothing else of this process runs meanwhile."""
    no_escapes = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    if no_escapes.count(b'"') > 2 * MAX_STRINGS:
        raise refused(_too_many(MAX_STRINGS, "names and texts"))
    no_texts = _TEXT.sub(b"", no_escapes)
    if no_texts.count(b"[") + no_texts.count(b"{") > MAX_STRINGS:
        raise refused(_too_many(MAX_STRINGS, "lists and objects"))
    if no_texts.count(b",") > MAX_ITEMS:
        raise refused(_too_many(MAX_ITEMS, "items in its lists"))


def _too_many(most: int, what: str) -> str:
    return f"the body has more than {most} {what}; send less in a request"
