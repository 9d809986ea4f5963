"""Log-probabilities in the two forms of the OpenAI API."""

import json
import math
from collections.abc import Sequence
from typing import Any, Final, cast

from monge.engine.logprobs import TokenLogprob
from monge.serve.token_text import TokenTexts

_LOWEST: Final = -9999.0
"""Log-probability of an impossible token, as in vLLM; JSON has no infinity."""


class Json(str):
    """Text that is JSON already.

    Answers have up to half a million log-probabilities. As objects, each would take a microsecond of
    every garbage collection, and `json.dumps` would hold the interpreter for all of them.
    """

    __slots__ = ()


def dumped(value: object) -> str:
    """JSON of objects and lists, in which some values may be `Json`; no call takes long."""
    if isinstance(value, Json):
        return value
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(one)}" for key, one in items) + "}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in cast("list[Any]", value)):
        return "[" + ",".join(map(dumped, cast("list[object]", value))) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class LogprobWriter:
    """Writes the log-probabilities of one choice, chunk by chunk.

    Args:
        texts: Names tokens.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0

    def completion(
        self,
        entries: Sequence[TokenLogprob],
        prompt: tuple[int, Sequence[TokenLogprob]] | None = None,
    ) -> dict[str, Any]:
        """Return the lists of `/v1/completions`: one entry a token; offsets add up the token texts.

        Args:
            entries: New tokens of the completion.
            prompt: If the prompt is echoed, its first token, which has no log-probability, and the
                log-probabilities of the others.
        """
        tokens, logprobs, top, offsets = list[int](), list[float | None](), list[str](), list[int]()
        if prompt is not None:
            first, entries = prompt[0], [*prompt[1], *entries]
            tokens.append(first)
            logprobs.append(None)
            top.append("null")
        for entry in entries:
            tokens.append(entry.token_id)
            logprobs.append(_number(entry.logprob))
            top.append(self._named(entry))
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._texts.name(token))
        return {
            "tokens": [self._texts.name(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": Json(f"[{','.join(top)}]"),
            "text_offset": offsets,
        }

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the list of `/v1/chat/completions`."""
        content: list[str] = []
        for entry in entries:
            top = ",".join("{" + self._described(*pair) + "}" for pair in entry.top)
            own = self._described(entry.token_id, entry.logprob)
            content.append(f'{{{own},"top_logprobs":[{top}]}}')
        return {"content": Json(f"[{','.join(content)}]"), "refusal": None}

    def _named(self, entry: TokenLogprob) -> str:
        """Return the most probable tokens and the token itself by text; equal texts keep one."""
        named = dict[str, float]()
        for token, logprob in sorted(
            [*entry.top, (entry.token_id, entry.logprob)], key=lambda pair: -pair[1]
        ):
            named.setdefault(self._texts.json(token)[0], _number(logprob))
        return "{" + ",".join(f"{text}:{logprob!r}" for text, logprob in named.items()) + "}"

    def _described(self, token_id: int, logprob: float) -> str:
        text, utf8 = self._texts.json(token_id)
        return f'"token":{text},"logprob":{_number(logprob)!r},"bytes":{utf8}'


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
