"""Tokens to text, piece by piece, with stop strings found where plain decoding would find them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final, Protocol, runtime_checkable

from transformers.convert_slow_tokenizer import bytes_to_unicode

PART: Final = "bytes:"
"""Before the bytes of a token that is part of a character, as in the OpenAI API."""
TOKEN_ID: Final = "token_id:"
"""Prefix of the number of a token that has no text, as in vLLM."""

_NEIGHBOURS: Final = 8
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MOST_INCOMPLETE: Final = 3
"""Most bytes, so most tokens, of a character in UTF-8 that lacks some."""
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@runtime_checkable
class Tokenizer(Protocol):
    """The methods of a tokenizer that decoding needs."""

    def __call__(self, text: str) -> Mapping[str, Any]:
        """The tokens of a text, under `input_ids`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a run of tokens."""
        ...


class TokenTexts:
    r"""Texts and bytes of single tokens where they stand in a text, remembered.

    A word of SentencePiece has its blank, and a special token the text that spells it. The name of
    a token that is part of a character lists its bytes, as in the OpenAI API: `bytes:\xf0\x9f`.

    Args:
        tokenizer: The tokenizer. If it is `None`, the name of a token is its number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name, self.utf8 = cache(self._name), cache(self._utf8)
        self.text = cache(self._text)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._spelled = {number: str(token) for number, token in added.items()}
        self._skipped = {number for number, token in added.items() if token.special}

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return different names: a token with the text of an earlier token is `token_id:N`."""
        named = dict[str, int]()
        for token in token_ids:
            name = self.name(token)
            name = name if named.setdefault(name, token) == token else f"{TOKEN_ID}{token}"
            named.setdefault(name, token)
        numbers = {token: name for name, token in named.items()}
        return [numbers[token] for token in token_ids]

    def is_skipped(self, token_id: int) -> bool:
        """Return whether the text leaves a token out because it is special."""
        return token_id in self._skipped

    def _name(self, token_id: int) -> str:
        if self.tokenizer is None:
            return str(token_id)
        text = self.text(token_id)
        if _REPLACEMENT not in text or (data := self.utf8(token_id)) is None:
            return text
        try:
            return bytes(data).decode()
        except UnicodeDecodeError:
            return PART + "".join(f"\\x{byte:02x}" for byte in data)

    def _utf8(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, or `None` if the tokenizer does not give them."""
        text = self.text(token_id)
        if text and _REPLACEMENT not in text:
            return list(text.encode())
        spelled = self.tokenizer.convert_ids_to_tokens(token_id)
        if spelled is None:
            return None
        if (single := _BYTE_TOKEN.fullmatch(spelled)) is not None:
            return [int(single[1], 16)]
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return [byte_of[letter] for letter in spelled] if set(spelled) <= byte_of.keys() else None

    def _text(self, token_id: int) -> str:
        """Return the text of a token inside a text; parts of characters become U+FFFD."""
        if self.tokenizer is None:
            return str(token_id)
        if token_id in self._spelled:
            return self._spelled[token_id]
        letter, before = self._letter
        text = self._decode([*letter, token_id])
        return text[len(before) :] if text.startswith(before) else self._decode([token_id])

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """A token of a letter, and its text: many decoders strip the blank of the first token."""
        token_ids = self.tokenizer("a")["input_ids"]
        letter = next(([token] for token in token_ids if self._decode([token]).strip() == "a"), [])
        return letter, self._decode(letter) if letter else ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


class PlacedTexts:
    """Splits the text of a sequence into the parts that its tokens add, in order.

    Args:
        texts: Gives special tokens, which add nothing, their spelled text.
        before_ids: Tokens before the sequence.
    """

    def __init__(self, texts: TokenTexts, before_ids: Sequence[int]) -> None:
        self._texts = texts
        self._stream = (
            None if texts.tokenizer is None else TextStream(texts.tokenizer, before_ids, ())
        )

    def of(self, token_ids: Sequence[int], *, last: bool) -> Iterator[tuple[str, int]]:
        """Yield the text of each token, and how many characters of the whole text it adds.

        The texts add up to the whole text. A token that ends inside a character has none, and the
        token that completes it has the character. `last`: no token follows.
        """
        for place, token in enumerate(token_ids, 1):
            if self._stream is None:
                yield self._texts.name(token), len(self._texts.name(token))
                continue
            self._stream.push(token)
            text = self._stream.take(last=last and place == len(token_ids))
            is_special = self._texts.is_skipped(token)
            yield (text + self._texts.name(token) if is_special else text), len(text)


class TextStream:
    """The growing text of a request.

    Tokens are decoded together with a few tokens before them, because a character may need several
    tokens. Text that ends in an incomplete character waits for the next token. Bytes that cannot
    become a character any more do not wait, so the work for a token is bounded. Without stop
    strings nothing is decoded until text is read.

    A stop string that is the text of a special token also stops at that token, which decoding
    leaves out. Other stop strings see the text without special tokens.

    Args:
        tokenizer: Turns ids into text.
        prompt_ids: The prompt, whose end gives the first tokens their left neighbours.
        stop: Stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids = list(prompt_ids[-_NEIGHBOURS - _MOST_INCOMPLETE :])
        # The window `_ids[_start:]` is decoded as a whole; `_shown` is what it read as when its
        # text was last taken over.
        self._start = 0
        # A prompt may end inside a character, which the first tokens then complete.
        self._shown = ""
        self._move()
        self._sent = 0
        self.text = ""
        self.stop_string: str | None = None
        """The stop string before which the text ends, once it has come."""
        self._stop_ids = self._special_ids(self._stop)

    def stops_at(self, token_id: int) -> bool:
        """Return whether a stop string is the text of this token, which is special."""
        return token_id in self._stop_ids

    def push(self, token_id: int) -> bool:
        """Add a token; return whether it completes a stop string, which `text` then leaves out."""
        self._ids.append(token_id)
        if not self._stop or self.stop_string is not None:
            return False
        start = max(0, len(self.text) - self._longest_stop)
        is_special = token_id in self._stop_ids
        self._advance(last=is_special)
        places = {stop: self.text.find(stop, start) for stop in self._stop}
        matches = {stop: place for stop, place in places.items() if place >= 0}
        if matches:
            self.stop_string = min(matches, key=matches.__getitem__)
            self.text = self.text[: matches[self.stop_string]]
        elif is_special:
            self.stop_string = self._stop_ids[token_id]
        return self.stop_string is not None

    def finish(self) -> None:
        """No token follows: what waited for the rest of a character is decoded as it is."""
        if self.stop_string is None:
            self._advance(last=True)

    def take(self, *, last: bool) -> str:
        """Text not handed out yet; what might become a stop string is held back until `last`."""
        if self.stop_string is None:
            self._advance(last=last)
        end = len(self.text) if last else len(self.text) - self._held()
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _advance(self, *, last: bool) -> None:
        now = self._decode(self._ids[self._start :]) if last else self._settled()
        self.text += now[len(self._shown) :]
        self._shown = now
        if len(self._ids) - self._start > 4 * _NEIGHBOURS and not last:
            self._move()

    def _settled(self) -> str:
        """Return the part of the window's text that no further token changes.

        An incomplete character has at most three tokens. If the text before these ends in U+FFFD as
        well, the bytes are no UTF-8, and only the last U+FFFD may still become a character.
        """
        window = self._ids[self._start :]
        for size in range(len(window), max(0, len(window) - _MOST_INCOMPLETE) - 1, -1):
            text = self._decode(window[:size])
            if not text.endswith(_REPLACEMENT):
                return text
        return self._decode(window)[:-1]

    def _move(self) -> None:
        """Begin the window a few tokens before the end, and not inside a character."""
        windows = list[tuple[int, int, str]]()
        for count in range(_NEIGHBOURS, _NEIGHBOURS + _MOST_INCOMPLETE + 1):
            self._start = max(0, len(self._ids) - count)
            text = self._settled()
            windows.append((text.count(_REPLACEMENT), -self._start, text))
            if not windows[-1][0]:
                break
        _, start, self._shown = min(windows)
        self._start = -start

    def _held(self) -> int:
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _special_ids(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the tokens that decoding leaves out and whose text is in `texts`."""
        if (id_of := getattr(self._tokenizer, "convert_tokens_to_ids", None)) is None:
            return {}
        spelled: Any = getattr(self._tokenizer, "convert_ids_to_tokens", str)
        ids = {id_of(text): text for text in texts}
        return {
            number: text
            for number, text in ids.items()
            if number is not None and spelled(number) == text and not self._decode([number])
        }
