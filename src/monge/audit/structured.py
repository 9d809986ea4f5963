"""Structured requests of an audit: a regex whose texts have a known law.

Characters of two overlapping sets come in turn. Each set holds most of what a model would write, so
that drafts are sometimes forbidden and often accepted: a server that treats a forbidden draft wrongly
shows it. Sets of printable ASCII characters mean the same to every library of grammars.
"""

import re
from contextlib import suppress
from typing import Any, Final

from monge.audit.client import Server, ServerError

_EVEN, _ODD = "[ -di-~]", "[ -hm-~]"
REGEX: Final = f"({_EVEN}{_ODD})*"
"""Printable characters, without `e` to `h` at even places and without `i` to `l` at odd places."""

_GOES_ON: Final = (
    re.compile(f"({_EVEN}{_ODD})*{_EVEN}?"),
    re.compile(f"({_ODD}{_EVEN})*{_ODD}?"),
)
_ASKED: Final[tuple[dict[str, Any], ...]] = (
    {"structured_outputs": {"regex": REGEX}},  # vLLM, this library
    {"guided_regex": REGEX},  # vLLM before 0.12
    {"regex": REGEX},  # SGLang
    {"grammar": f"root ::= ({_EVEN} {_ODD})*"},  # llama.cpp
)
_NUM_CHARACTERS: Final = 64  # free English keeps to the regex for so long with probability 3e-5


def goes_on(num_characters: int, text: str) -> bool:
    """Return whether the regex admits a text after `num_characters` earlier characters; it admits no empty text."""
    return text != "" and _GOES_ON[num_characters % 2].fullmatch(text) is not None


def may_end(num_characters: int) -> bool:
    """Return whether the regex lets a text end after `num_characters` characters."""
    return num_characters % 2 == 0


async def structured_fields(client: Server, prompts: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that ask a server for texts of `REGEX`; none if it takes no such field.

    Servers may ignore fields that they do not know, so the texts must follow the regex.
    """
    for fields in _ASKED:
        with suppress(ServerError):
            num_characters = 0
            for prompt in 4 * prompts:
                completion = await client.complete(prompt, max_tokens=16, temperature=1.0, **fields)
                if completion.text and not goes_on(0, completion.text):
                    break
                num_characters += len(completion.text)
                if num_characters >= _NUM_CHARACTERS:
                    return fields
    return {}
