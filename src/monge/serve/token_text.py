"""The text and the bytes of single tokens, for log-probabilities."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, eq=False)
class TokenTexts:
    """Names tokens.

    Args:
        tokenizer: The tokenizer. Without one, the name of a token is its number.
    """

    tokenizer: Any
    _known: dict[int, str] = field(default_factory=dict[int, str], init=False)
    _json: dict[int, tuple[str, str]] = field(
        default_factory=dict[int, tuple[str, str]], init=False
    )

    def name(self, token_id: int) -> str:
        """Return the text of one token; parts of characters become U+FFFD."""
        if token_id not in self._known:
            self._known[token_id] = self._decoded(token_id)
        return self._known[token_id]

    def utf8(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, or `None` if the tokenizer does not give them."""
        name = self.name(token_id)
        if _REPLACEMENT not in name:
            return list(name.encode())
        spelled = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if (single := _BYTE_TOKEN.fullmatch(spelled)) is not None:
            return [int(single[1], 16)]
        letters = _byte_letters()
        return [letters[letter] for letter in spelled] if set(spelled) <= letters.keys() else None

    def json(self, token_id: int) -> tuple[str, str]:
        """Return the text and the bytes of a token as JSON."""
        if token_id not in self._json:
            parts = json.dumps(self.name(token_id)), json.dumps(self.utf8(token_id))
            self._json[token_id] = parts
        return self._json[token_id]

    def _decoded(self, token_id: int) -> str:
        return (
            str(token_id)
            if self.tokenizer is None
            else self.tokenizer.decode([token_id], skip_special_tokens=False)
        )


@cache
def _byte_letters() -> Mapping[str, int]:
    """Return the letters of byte-level tokenizers: printable bytes, then from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }
