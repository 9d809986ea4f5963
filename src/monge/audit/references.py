"""Where reference laws come from: a server without speculation, or the forward of the same checkpoint in this process.

Reference laws never come from the audited server: engines are known to return wrong
log-probabilities under speculation.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from monge.audit.client import TOKEN_ID, Client, Completion, RefusedError, ServerError
from monge.audit.threads import one_at_a_time
from monge.audit.token_law import END, TokenLaw, law_of_logprobs, truncated
from monge.core.model import NodeBlock, SequenceModel
from monge.core.sampling_rules import SamplingRules
from monge.core.text import token_ids_of

_UNNAMED: Final = "\N{REPLACEMENT CHARACTER}"
_SORTED: Final = 256
"""Most probable tokens to which sampling rules are applied."""


@runtime_checkable
class Reference(Protocol):
    """Knows the law of every token given the text before it."""

    eos_names: frozenset[str]
    """Names of tokens that end a text."""

    async def laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules
    ) -> list[TokenLaw | None]:
        """The laws of the tokens of a text.

        The list ends early where the text before a token cannot be read again; an entry is `None`
        where the law is unknown. Both depend on the text before the token only, so that leaving
        tokens out does not bias a test.

        Args:
            prompt: The prompt.
            tokens: Names of the tokens; `END` for the end of the text.
            rules: Sampling rules of the request.
        """
        ...

    async def noise(self, prompts: Sequence[str]) -> float:
        """The largest difference between two answers of this reference to one question, in nats."""
        ...


def token_names(completion: Completion, eos_names: frozenset[str]) -> tuple[str, ...]:
    """Names of the tokens of a completion, with `END` last where the text ended by itself.

    Where a server returns no tokens, the text counts as one: only single tokens are asked of such a
    server.
    """
    shown = (
        (completion.text,)
        if completion.tokens is None and completion.text
        else completion.tokens or ()
    )
    names = [END if name in eos_names else name for name in shown]
    if completion.finish == "stop" and names[-1:] != [END]:
        names.append(END)
    return tuple(names)


class LocalReference:
    """Laws from the target's own forward.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        eos_ids: Tokens that end a text.
        by_id: Whether the audited server names tokens by their ids.
    """

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Any,  # noqa: ANN401 (a host's class)
        eos_ids: frozenset[int],
        *,
        by_id: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._eos_ids = model, tokenizer, eos_ids
        ids = range(model.vocab_size)
        spelled = [
            f"{TOKEN_ID}{i}" if by_id else tokenizer.decode([i], skip_special_tokens=False)
            for i in ids
        ]
        self.eos_names = frozenset(spelled[i] for i in eos_ids)
        # Tokens that share a name, such as parts of characters, cannot be told apart: they count as
        # unnamed.
        often = {name for name, times in Counter(spelled).items() if times > 1}
        self._names = [
            END if i in eos_ids else "" if name in often else name for i, name in enumerate(spelled)
        ]
        self._ids = {name: i for i, name in enumerate(self._names) if name not in {END, ""}}
        self._sequences = count()
        self._prompts: dict[str, list[int]] = {}
        self._lock = asyncio.Lock()

    async def laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules
    ) -> list[TokenLaw | None]:
        return await one_at_a_time(self._lock, self._laws, prompt, tokens, rules)

    async def noise(self, prompts: Sequence[str]) -> float:
        return 0.0

    def _laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules
    ) -> list[TokenLaw | None]:
        if prompt not in self._prompts:
            self._prompts[prompt] = list(token_ids_of(self._tokenizer, prompt))
        *before, last = self._prompts[prompt]
        ids = list[int]()
        for name in tokens[:-1]:
            if name not in self._ids:
                break
            ids.append(self._ids[name])
        sequence = next(self._sequences)
        with torch.inference_mode():
            self._model.open({sequence: before})
            logits = self._model.extend({sequence: NodeBlock.chain([last, *ids])})[sequence]
            self._model.close(sequence)
            scores = logits.double() / rules.temperature
            if len(self._eos_ids) > 1:
                ends = sorted(self._eos_ids)
                together = torch.logsumexp(scores[:, ends], dim=-1)
                scores[:, ends] = -torch.inf
                scores[:, ends[0]] = together
            values, ids = torch.topk(torch.softmax(scores, dim=-1), min(_SORTED, scores.shape[-1]))
            counts = (values > 0.0).sum(dim=-1)
            rests = (1.0 - values.sum(dim=-1)).clamp(min=0.0)
            if ids.shape[-1] == self._model.vocab_size:
                rests.zero_()
        tempered = replace(rules, temperature=1.0)
        rows = zip(values.cpu().numpy(), ids.tolist(), counts.tolist(), rests.tolist(), strict=True)
        return [
            self._law(probs[:num_positive], tokens[:num_positive], rest, tempered)
            for probs, tokens, num_positive, rest in rows
        ]

    def _law(
        self, probs: np.ndarray, ids: list[int], rest: float, rules: SamplingRules
    ) -> TokenLaw | None:
        law = truncated([self._names[i] for i in ids], probs, rest, rules)
        if law is None or "" not in law.places:
            return law
        is_named = np.array([name != "" for name in law.names], dtype=bool)
        return TokenLaw(
            tuple(filter(None, law.names)),
            law.probs[is_named],
            law.rest + float(law.probs[~is_named].sum()),
        )


class ServerReference:
    """Laws from a server that returns log-probabilities.

    One request tells the laws of a whole text where the server returns the log-probabilities of
    prompts (`echo` with `logprobs`). A server without `echo` that reads prompts of text and token
    ids, such as llama.cpp, is asked for every next token.

    Args:
        client: The server; speculation must be off.
        eos_names: Names of tokens that end a text.
        by_id: Whether both servers name tokens by their ids.
        num_top: Largest log-probabilities to ask for.
    """

    def __init__(
        self, client: Client, *, eos_names: frozenset[str], by_id: bool = False, num_top: int = 20
    ) -> None:
        self._client, self.eos_names, self._by_id, self._num_top = client, eos_names, by_id, num_top
        self._prompts: dict[str, tuple[str, ...] | None] = {}  # None: asked for every next token
        self._crowd = asyncio.Semaphore(16)
        self.speculates = False

    async def laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules
    ) -> list[TokenLaw | None]:
        if prompt not in self._prompts:
            self._prompts[prompt] = await self._prompt_tokens(prompt)
        known = self._prompts[prompt]
        if known is None:
            return await self._next_laws(prompt, tokens, rules)
        # Of a text that is tokenized in another way, the longest beginning is judged that is
        # tokenized as it was generated. It depends on the earlier tokens only, since a beginning of
        # a canonical tokenization is canonical.
        for end in range(len(tokens) - 1, -1, -1):
            echoed = await self._echo(prompt, known, tokens[:end])
            if echoed.tokens is not None and echoed.tokens[: len(known) + end] == (
                *known,
                *tokens[:end],
            ):
                return [
                    self._law(top, rules) for top in echoed.top[len(known) : len(known) + end + 1]
                ]
        return []

    async def noise(self, prompts: Sequence[str]) -> float:
        alone = [await self.laws(prompt, [END], SamplingRules()) for prompt in prompts]
        crowd = await asyncio.gather(
            *(self.laws(prompt, [END], SamplingRules()) for prompt in prompts)
        )
        pairs = [
            (a, b)
            for one, other in zip(alone, crowd, strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        return max(
            (_difference(a, b) for a, b in pairs if a is not None and b is not None), default=0.0
        )

    async def _prompt_tokens(self, prompt: str) -> tuple[str, ...] | None:
        with suppress(RefusedError):
            echoed = await self._echo(prompt, (), ())
            # One token is the generated one: the field was ignored.
            if echoed.tokens and len(echoed.top) == len(echoed.tokens) > 1:
                return echoed.tokens[:-1]
        if self._by_id:
            with suppress(RefusedError):
                await self._ask([prompt, 0])
                return None
        raise ServerError(
            f"{self._client.url} does not return the log-probabilities of prompts: an audit "
            "needs `echo` with `logprobs`, or a llama.cpp server and its ends of text by their "
            "ids (--eos token_id:2); give --target instead"
        )

    async def _echo(self, prompt: str, known: Sequence[str], tokens: Sequence[str]) -> Completion:
        text = prompt + "".join(tokens)
        async with self._crowd:
            return await self._ask(
                _ids((*known, *tokens)) if self._by_id and known else text, echo=True
            )

    async def _next_laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules
    ) -> list[TokenLaw | None]:
        async with self._crowd:  # one after another: the server keeps the text before a token
            answers = [
                await self._ask([prompt, *_ids(tokens[:place])] if place else prompt)
                for place in range(len(tokens))
            ]
        return [self._law(answer.top[0] if answer.top else None, rules) for answer in answers]

    async def _ask(self, prompt: str | Sequence[int | str], **fields: Any) -> Completion:
        found = await self._client.complete(
            prompt,
            max_tokens=1,
            temperature=1.0,
            logprobs=self._num_top,
            return_tokens_as_token_ids=True if self._by_id else None,
            **fields,
        )
        self.speculates |= found.speculates
        return found

    def _law(self, top: Any, rules: SamplingRules) -> TokenLaw | None:  # noqa: ANN401 (JSON)
        if not top:
            return None
        # Servers add the token of the text to the largest ones: cut off, or the categories would
        # depend on what was drawn.
        largest = sorted(top.items(), key=lambda pair: -pair[1])[: self._num_top]
        merged = dict[str, float]()
        for name, logprob in largest:
            if _UNNAMED in name and not rules.truncates:
                continue  # several parts of characters share this name: they count as unnamed
            own = END if name in self.eos_names else name
            merged[own] = float(np.logaddexp(merged.get(own, -np.inf), logprob))
        law = law_of_logprobs(merged, rules)
        # Of several tokens with this name, the server lists one: how many of them are kept is
        # unknown.
        return None if law is not None and any(_UNNAMED in name for name in law.names) else law


def _ids(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix(TOKEN_ID)) for name in names]


def _difference(a: TokenLaw, b: TokenLaw) -> float:
    shared = [
        (a.probs[place], b.probs[b.places[name]])
        for place, name in enumerate(a.names[:4])
        if name in b.places
    ]
    return max((abs(float(np.log(p / q))) for p, q in shared), default=0.0)
