"""Log-probabilities in the two forms of the OpenAI API."""

import math
from collections.abc import Sequence
from typing import Any, Final

from monge.engine.logprobs import TokenLogprob
from monge.serve.token_text import TokenTexts

_LOWEST: Final = -9999.0
"""Log-probability of an impossible token, as in vLLM; JSON has no infinity."""


class LogprobWriter:
    """Writes the log-probabilities of one choice, chunk by chunk.

    Args:
        texts: Names tokens.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0

    def completion(
        self, entries: Sequence[TokenLogprob], prompt: tuple[int, Sequence[TokenLogprob]] | None = None
    ) -> dict[str, list[Any]]:
        """Return the lists of `/v1/completions`: one entry a token; offsets add up the token texts.

        Args:
            entries: New tokens of the completion.
            prompt: If the prompt is echoed, its first token, which has no log-probability, and the
                log-probabilities of the others.
        """
        tokens, logprobs, top = list[str](), list[float | None](), list[dict[str, float] | None]()
        if prompt is not None:
            first, entries = prompt[0], [*prompt[1], *entries]
            tokens.append(self._texts.name(first))
            logprobs.append(None)
            top.append(None)
        for entry in entries:
            tokens.append(self._texts.name(entry.token_id))
            logprobs.append(_number(entry.logprob))
            top.append(self._named(entry))
        offsets = list[int]()
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the list of `/v1/chat/completions`."""
        content = [
            self._described(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._described(token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _named(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the most probable tokens and the token itself by text; equal texts keep one."""
        named = dict[str, float]()
        for token, logprob in sorted([*entry.top, (entry.token_id, entry.logprob)], key=lambda pair: -pair[1]):
            named.setdefault(self._texts.name(token), _number(logprob))
        return named

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.name(token_id), "logprob": _number(logprob), "bytes": self._texts.utf8(token_id)}


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
