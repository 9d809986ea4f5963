"""Tokens to text, piece by piece, with stop strings found where plain decoding would find them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

_NEIGHBOURS: Final = 8


@runtime_checkable
class Tokenizer(Protocol):
    """The methods of a tokenizer that decoding needs."""

    def __call__(self, text: str) -> Mapping[str, Any]:
        """The tokens of a text, under `input_ids`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a run of tokens."""
        ...


class TextStream:
    """The growing text of one request.

    Tokens are decoded together with the few before them, because one character may need several
    tokens; text that ends in an incomplete character waits for the next token. Without stop strings
    nothing is decoded until text is asked for.

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
        self._ids = list(prompt_ids[-_NEIGHBOURS:])
        # The window `_ids[_start:]` is decoded as a whole; `_shown` is what it read as when its
        # text was last taken over.
        self._start = 0
        # A prompt may end inside a character, which the first tokens then complete.
        self._shown = self._decode(self._ids).rstrip("\N{REPLACEMENT CHARACTER}")
        self._sent = 0
        self.text = ""
        self.stop_string: str | None = None
        """The stop string before which the text ends, once it has come."""

    def push(self, token_id: int) -> bool:
        """Add one token; true if it completes a stop string, and the text then ends before it."""
        self._ids.append(token_id)
        if not self._stop or self.stop_string is not None:
            return False
        start = max(0, len(self.text) - self._longest_stop)
        self._advance(last=False)
        places = {stop: self.text.find(stop, start) for stop in self._stop}
        matches = {stop: place for stop, place in places.items() if place >= 0}
        if matches:
            self.stop_string = min(matches, key=matches.__getitem__)
            self.text = self.text[: matches[self.stop_string]]
        return bool(matches)

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
        now = self._decode(self._ids[self._start :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return
        self.text += now[len(self._shown) :]
        self._shown = now
        if len(self._ids) - self._start > 4 * _NEIGHBOURS:
            self._start = len(self._ids) - _NEIGHBOURS
            self._shown = self._decode(self._ids[self._start :])

    def _held(self) -> int:
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
