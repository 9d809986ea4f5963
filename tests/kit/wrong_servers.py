"""A small completion server over a toy engine: what an audit sees of a real one.

The application speaks ASGI and needs no web framework: tests call it in process, or serve it on a
socket.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from transformers import AddedToken

from monge.core.sampling_rules import SamplingRules
from monge.laws.draws import SeededDraws
from tests.kit.wrong_engines import (
    END,
    TARGET,
    ChainEngine,
    Engine,
    PlainEngine,
    StructuredTable,
    Text,
    ToyTable,
    law,
)

LETTERS: Final = ("<end>", *"abcdefghijkl")
Message = MutableMapping[str, Any]


class Letters:
    """A tokenizer: every letter is a token."""

    added_tokens_decoder: Final = {END: AddedToken(LETTERS[END], special=True)}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(letter) for letter in text]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            LETTERS[token] for token in token_ids if not (skip_special_tokens and token == END)
        )


class ToyServer:
    """`/v1/completions` and `/v1/models`, with log-probabilities and `echo`.

    Args:
        engine: What writes the texts.
        seed: Of requests that bring none.
        latency_s: Seconds that every request takes.
        chunks: Pieces in which an answer is sent.
        num_refused: First requests that are answered with status 429.
        logprobs: Whether it returns log-probabilities.
        by_id: Whether it honours `return_tokens_as_token_ids`; otherwise it refuses the field.
        table: The target, for log-probabilities.
        grammar_field: Field of a request whose value, if there is one, asks for a structured text;
            engines of this library ignore it.
        leaks: Fields that a request takes over from the last one that is in work beside it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        chunks: int = 1,
        num_refused: int = 0,
        logprobs: bool = True,
        by_id: bool = False,
        table: ToyTable = TARGET,
        grammar_field: str = "structured_outputs",
        leaks: tuple[str, ...] = (),
    ) -> None:
        self._engine, self._seed, self._latency_s = engine, seed, latency_s
        self._chunks, self._refused = chunks, num_refused
        self._logprobs, self._by_id, self._table = logprobs, by_id, table
        self._num_at_once, self.num_requests = 0, 0
        self._grammar_field, self._leaks, self._last = grammar_field, leaks, dict[str, Any]()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        fields = json.loads(body) if body else {}
        self._num_at_once, self._last = self._num_at_once + 1, fields
        try:
            await asyncio.sleep(self._latency_s)  # requests that came together are in work together
            if scope["path"] == "/v1/models":
                status, answer = 200, {"data": [{"id": "toy"}]}
            else:
                status, answer = self._answer(
                    fields | {name: self._last.get(name) for name in self._leaks}
                )
        finally:
            self._num_at_once -= 1
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        size = -(-len(content) // self._chunks)
        for start in range(0, len(content), size):
            more = start + size < len(content)
            await send(
                {
                    "type": "http.response.body",
                    "body": content[start : start + size],
                    "more_body": more,
                }
            )

    def _answer(self, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self._refused > 0:
            self._refused -= 1
            return 429, {"error": {"message": "too many requests"}}
        if "return_tokens_as_token_ids" in fields and not self._by_id:
            return 400, {"error": {"message": "unknown field return_tokens_as_token_ids"}}
        given = fields["prompt"]
        prompt = tuple(Letters()(given)["input_ids"]) if isinstance(given, str) else tuple(given)
        top_k, top_p = fields.get("top_k"), fields.get("top_p")
        rules = SamplingRules(
            temperature=fields.get("temperature", 1.0),
            top_k=None if top_k == -1 else top_k,
            top_p=1.0 if top_p is None else top_p,
        )
        row, seed = (self.num_requests, self._seed) if "seed" not in fields else (0, fields["seed"])
        self.num_requests += 1
        made = self._engine_of(fields, len(prompt)).generate(
            prompt,
            rules,
            fields["max_tokens"],
            SeededDraws(seed, row),
            num_at_once=self._num_at_once,
        )
        ended = made[-1:] == [END]
        shown = tuple(made[:-1] if ended else made)
        first = 0 if fields.get("echo") else len(prompt)
        choice: dict[str, Any] = {
            "index": 0,
            "text": Letters().decode([*prompt, *shown][first:], skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length",
        }
        if self._logprobs and fields.get("logprobs") is not None:
            is_by_id = bool(fields.get("return_tokens_as_token_ids"))
            # An end of text is listed where it was generated, as several servers do.
            listed = tuple(made) if fields.get("echo") else shown
            choice["logprobs"] = self._listed(
                prompt, listed, first, fields["logprobs"], is_by_id=is_by_id
            )
        return 200, {"choices": [choice]}

    def _engine_of(self, fields: dict[str, Any], num_prompt_tokens: int) -> Engine:
        engine = self._engine
        if fields.get(self._grammar_field) is None or not isinstance(
            engine, ChainEngine | PlainEngine
        ):
            return engine
        return replace(engine, target=StructuredTable(engine.target, num_prompt_tokens))

    def _listed(
        self, prompt: Text, made: Text, first: int, num_top: int, *, is_by_id: bool
    ) -> dict[str, Any]:
        names = [f"token_id:{token}" for token in range(len(LETTERS))] if is_by_id else LETTERS
        text, logprobs, top = (
            (*prompt, *made),
            list[float | None](),
            list[dict[str, float] | None](),
        )
        for place in range(first, len(text)):
            if place == 0:
                logprobs.append(None)
                top.append(None)
                continue
            logs = np.log(law(self._table, text[:place], SamplingRules()))
            largest = {*np.argsort(-logs)[:num_top].tolist(), text[place]}
            logprobs.append(float(logs[text[place]]))
            top.append({names[token]: float(logs[token]) for token in largest})
        return {
            "tokens": [names[token] for token in text[first:]],
            "token_logprobs": logprobs,
            "top_logprobs": top,
        }
