"""Tokens to text, piece by piece, with stop strings found where plain decoding would find them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def __call__(self, text: str) -> Mapping[str, Any]:
        """The tokens of a text, under `input_ids`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a run of tokens."""
        ...


class TextStream:
    """The growing text of one request.

    Tokens are decoded together with the few before them, because one character may need several tokens; text that ends in an
    incomplete character waits for the next token.

    Args:
        tokenizer: Turns ids into text.
        prompt_ids: The prompt, whose end gives the first tokens their left neighbours.
        stop: Stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids = list(prompt_ids[-8:])
        # `_ids[_settled:_read]` is decoded already and gives the tokens after it their left neighbours.
        self._settled, self._read = 0, len(self._ids)
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Add one token; true if it completes a stop string, and the text then ends before it."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._settled : self._read])
        now = self._decode(self._ids[self._settled :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") or len(now) <= len(before):
            return False
        self._settled, self._read = self._read, len(self._ids)
        start = max(0, len(self.text) - self._longest_stop)
        self.text += now[len(before) :]
        found = [position for stop in self._stop if (position := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def finish(self) -> None:
        """No token follows: what waited for the rest of a character is decoded as it is."""
        if not self.stopped and self._read < len(self._ids):
            before = self._decode(self._ids[self._settled : self._read])
            self.text += self._decode(self._ids[self._settled :])[len(before) :]
            self._read = len(self._ids)

    def take(self, *, last: bool) -> str:
        """Text not handed out yet; what might become a stop string is held back until `last`."""
        end = len(self.text) if last else len(self.text) - self._held()
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _held(self) -> int:
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
