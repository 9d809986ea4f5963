"""Texts on their way to a tokenizer."""

from collections.abc import Callable, Mapping
from typing import Any

from monge.core.errors import OptionError


def token_ids_of(
    tokenizer: Callable[..., Mapping[str, Any]], text: str, where: str = "prompt", **options: bool
) -> tuple[int, ...]:
    """Return the tokens of a text, as the tokenizer gives them under `input_ids`.

    A text that begins with BOS, as texts of chat templates do, does not get a second BOS.

    Raises:
        OptionError: If it holds half of a pair of surrogates, which is no character; `where` is the
            subject of the message.
    """
    check_text(text, where)
    ids = tuple(int(token) for token in tokenizer(text, **options)["input_ids"])
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None or ids[:2] != (start, start) or not options.get("add_special_tokens", True):
        return ids
    own = token_ids_of(tokenizer, text, where, add_special_tokens=False)
    return ids[1:] if ids[: len(own) + 1] == (start, *own) else ids


def check_text(text: str, where: str) -> None:
    """Raise `OptionError`, as `token_ids_of` does, if no tokenizer can read a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{where}: character {error.start} is {text[error.start]!r}, half of a pair of "
            "surrogates, which is no text; decode the bytes that it comes from as UTF-8, or replace it"
        ) from error
