"""Conversations of several turns."""

from collections.abc import Generator, Sequence
from typing import Any

from monge.engine.batch import decode
from monge.engine.chat_format import Message
from monge.engine.decoder import Decoder, Piece, piece_of
from monge.engine.session import Session, catch


class Conversation:
    """A conversation of several turns, whose earlier turns stay in the target's cache.

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
        self._last: Session | None = None

    def reply(self, text: str) -> Generator[Piece, None, None]:
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
        earlier, self._last = self._last, None
        session.stays_open = True
        if earlier is not None:
            session.continues = (earlier.context.request_id, self._num_shared(earlier, prompt))
        answer: list[str] = []
        try:
            for _ in decode([session], self._decoder.components, max_batch_size=1):
                piece = piece_of(session)
                answer.append(piece.text)
                yield piece
        finally:
            if session.finish_reason is None and session.text is not None:
                session.text.finish()
                answer.append(session.text.take(last=True))
            self._end(session)
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
            self.sessions.append(session)

    def reset(self) -> None:
        """Forget all turns, and keep the system message."""
        self.close()
        self.messages, self.sessions, self.num_dropped = [], [], 0

    def close(self) -> None:
        """Give back what the conversation holds in the target's cache."""
        if self._last is not None:
            self._decoder.components.target.close(self._last.context.request_id)
            self._last = None

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

    def _num_shared(self, earlier: Session, prompt: tuple[int, ...]) -> int:
        """Return how many tokens of an earlier text that the target has read begin this prompt."""
        held = earlier.context.token_ids[
            : self._decoder.components.target.length(earlier.context.request_id)
        ]
        pairs = zip(held, prompt[:-1], strict=False)
        return next(
            (place for place, (one, other) in enumerate(pairs) if one != other),
            min(len(held), len(prompt) - 1),
        )

    def _end(self, session: Session) -> None:
        """Keep the text in the cache if the request ended well, between two rounds."""
        if session.finish_reason in {"eos", "stop", "length"}:
            self._last = session
        else:
            # An interrupted forward may have left nodes behind, and one that failed may have opened
            # nothing.
            number = session.context.request_id
            catch(lambda: self._decoder.components.target.close(number))
