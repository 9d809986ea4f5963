"""Bodies of requests: from bytes to checked fields."""

import email.message
import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from monge.serve.errors import of_validation, refused
from monge.serve.fields import MAX_MESSAGES

MAX_STRINGS: Final = 32 * MAX_MESSAGES
"""Names and texts of one body, and its lists and objects.

A message has nine fields, and a part has two.
"""

MAX_ITEMS: Final = 1 << 19
"""Items of all lists and objects of one body: token ids, above all."""

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
    subtype = message.get_content_subtype()
    is_json = subtype == "json" or subtype.endswith("+json")
    if message.get_content_maintype() != "application" or not is_json:
        got = "has no content-type" if declared is None else f"has content-type {declared[:60]!r}"
        raise refused(
            f"the request {got}; send JSON with content-type application/json",
            code="invalid_content_type",
        )
    if coding.strip().lower() != "identity":
        raise refused(
            f"content-encoding {coding[:60]!r} is not supported; send the body uncompressed",
            code="invalid_content_encoding",
        )


def parsed(content: bytes, model: type[Model]) -> Model:
    """A body, checked.

    Raises:
        ApiError: If it is not JSON in UTF-8, or does not fit the model.
    """
    if not content:
        raise refused("the body is empty; send a JSON object")
    try:
        return model.model_validate(_fields(content))
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False)) from error


def _fields(content: bytes) -> Any:  # noqa: ANN401 (any JSON)
    # The JSON parser would take UTF-16 and UTF-32 too, and the scan would not see through them.
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(_UNREADABLE, code="invalid_json") from error
    # Nothing else of this process runs while a body is parsed, so its size is judged first, by what
    # a scan of bytes can see.
    no_escapes = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    limit = MAX_STRINGS
    if no_escapes.count(b'"') > 2 * limit:
        raise refused(f"the body has more than {limit} names and texts; no request needs as many")
    no_texts = _TEXT.sub(b"", no_escapes)
    if no_texts.count(b"[") + no_texts.count(b"{") > limit:
        raise refused(f"the body has more than {limit} lists and objects; no request needs as many")
    if no_texts.count(b",") > MAX_ITEMS:
        raise refused(
            f"the body has more than {MAX_ITEMS} items in its lists; send shorter "
            "prompts, or fewer in a request"
        )
    try:
        with _no_collections():
            return json.loads(text)
    except json.JSONDecodeError as error:
        raise refused(
            f"the body is not JSON: {error.msg} at position {error.pos}", code="invalid_json"
        ) from error
    # Integers of thousands of digits; thousands of brackets.
    except (ValueError, RecursionError) as error:
        raise refused(_UNREADABLE, code="invalid_json") from error


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage is looked for: a parser makes none, and a million lists would be looked at again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
