"""Words of messages that several rooms write."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

TextPartType = Literal["text", "input_text", "output_text"]
"""Types of the parts of a message that are read."""


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 answer`, `2 answers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unread_part(content: Any) -> str | None:  # noqa: ANN401 (JSON of a user's)
    """Say which part of a message's content is no text, such as an image; `None` if none is."""
    if not isinstance(content, list | tuple):
        return None
    parts: Sequence[Any] = content
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in get_args(TextPartType):
            return f"part {number} is of type {kind[:60]!r}, and only text is read here"
    return None
