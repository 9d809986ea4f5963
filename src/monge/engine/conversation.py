"""Conversations of several turns."""

from collections.abc import Generator, Sequence
from math import inf
from typing import Any

from monge.engine.batch import decode
from monge.engine.decoder import Decoder, StreamChunk, chunk_of
from monge.engine.session import Session
from monge.networks.prefix_cache import PrefixCache
from monge.requests.chat_format import Message


class Conversation:
    """A conversation of several turns, whose earlier turns are not read again.

    Args:
        decoder: Decodes the answers.
        system: The system message, if any.
        max_new_tokens: Most tokens of an answer.
        **options: Further options of every answer, as for `Decoder.requests`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        **options: Any,
    ) -> None:
        self._decoder = decoder
        self._options: dict[str, Any] = options | {"max_new_tokens": max_new_tokens}
        self._max_new_tokens = max_new_tokens
        self.system = system
        self.messages: list[Message] = []
        self.sessions: list[Session] = []
        self.num_dropped = 0
        """Earlier messages that the last answer was written without, because the context was full."""
        limit = decoder.max_length or inf
        self._prefixes = PrefixCache(max_tokens=lambda: limit, min_tokens=1)

    def reply(self, text: str) -> Generator[StreamChunk, None, None]:
        """Answer a message, piece by piece.

        An answer that is cut off, by closing the iterator or by an interrupt, stays in the
        conversation as far as it got.

        Args:
            text: What the user says.

        Raises:
            OptionError: If the chat template refuses the conversation, or an option is wrong.
            ContextLengthError: If this message alone, with its answer, does not fit the context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, self.num_dropped = self._fitting(messages)
        options: dict[str, Any] = {"row": len(self.sessions)} | self._options
        (request,) = self._decoder.requests([prompt], **options)
        session = self._decoder.session(request)
        answer: list[str] = []
        components, prefixes = self._decoder.components, self._prefixes
        try:
            for _ in decode([session], components, max_batch_size=1, prefixes=prefixes):
                piece = chunk_of(session)
                answer.append(piece.text)
                yield piece
        finally:
            if session.finish_reason is None and session.text is not None:
                answer.append(session.text.take(last=True))
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
            self.sessions.append(session)

    def reset(self) -> None:
        """Forget all turns, and keep the system message."""
        self.close()
        self.messages, self.sessions, self.num_dropped = [], [], 0

    def close(self) -> None:
        """Give back what the conversation keeps of its turns."""
        self._prefixes.clear()

    def _fitting(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], int]:
        """Tokens of the latest turns that fit the context with an answer, and how many messages were left out."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        limit = self._decoder.max_length
        dropped = 0
        while True:
            prompt = self._decoder.encode_chat([*system, *messages[dropped:]])
            is_last = dropped + 2 >= len(messages)
            if limit is None or len(prompt) + self._max_new_tokens <= limit or is_last:
                return prompt, dropped
            dropped += 2  # a question and its answer
