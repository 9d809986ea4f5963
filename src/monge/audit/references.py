"""Reference laws: of a server without speculation, or of the same checkpoint in this process.

Reference laws never come from the audited server: engines are known to return wrong
log-probabilities under speculation.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from monge.audit.client import (
    Client,
    Completion,
    RefusedError,
    ServerError,
    one_at_a_time,
)
from monge.audit.structured import goes_on, may_end
from monge.audit.token_law import END, TokenLaw, law_of_logprobs, truncated
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.text import token_ids_of
from monge.networks.base import NodeBlock, SequenceModel
from monge.requests.text import PART, TOKEN_ID, TokenTexts

_UNNAMED: Final = "\N{REPLACEMENT CHARACTER}"
_SORTED: Final = 256
"""Most probable tokens to which sampling rules are applied."""
_SEQUENCE: Final = -1  # no number of a request


@runtime_checkable
class Reference(Protocol):
    """The law of every token, given the text before it."""

    eos_names: frozenset[str]
    """Names of tokens that end a text."""

    async def laws(
        self,
        prompt: str,
        tokens: Sequence[str],
        rules: SamplingRules,
        *,
        is_structured: bool = False,
    ) -> list[TokenLaw | None]:
        """Return the laws of the tokens of a text; the name of its end is `END`.

        A structured text follows the regex of `monge.audit.structured`.

        The list ends early where the text before a token cannot be read again; an entry is `None`
        where the law is unknown. Both depend on the text before the token only, so that leaving
        tokens out does not bias a test.
        """
        ...

    async def noise(self, prompts: Sequence[str]) -> float:
        """Return the largest difference between two answers to the same question, in nats."""
        ...


def token_names(completion: Completion, eos_names: frozenset[str]) -> tuple[str, ...]:
    """Return the names of the tokens of a completion, with `END` last if the text ended by itself.

    If a server returns no tokens, the text counts as a token: such a server is asked for single
    tokens.
    """
    shown = completion.tokens or ()
    if completion.tokens is None and completion.text:
        shown = (completion.text,)
    names = [END if name in eos_names else name for name in shown]
    if completion.finish == "stop" and names[-1:] != [END]:
        names.append(END)
    return tuple(names)


def logits_along(
    model: SequenceModel, token_ids: Sequence[int], first: int, *, piece: int = 256
) -> Iterator[Float[Tensor, "nodes vocab"]]:
    """Yield the next-token logits after `token_ids[: first + 1]`, ..., after the whole text.

    Args:
        model: The model; nothing else may use it meanwhile.
        token_ids: The text.
        first: Number of tokens before the first token whose logits are returned.
        piece: Tokens of a forward: it bounds the logits that are held, not the text.
    """
    model.open({_SEQUENCE: token_ids[:first]})
    try:
        for start in range(first, len(token_ids), piece):
            part = tuple(token_ids[start : start + piece])
            yield model.extend({_SEQUENCE: NodeBlock.chain(part)})[_SEQUENCE]
            model.commit({_SEQUENCE: range(len(part))})
    finally:
        model.close(_SEQUENCE)


class LocalReference:
    """Laws from the target's own forward, beside those of the server's draft model if that is given.

    With `by_id` the audited server names tokens by their ids.
    """

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Any,  # noqa: ANN401 (a host's class)
        eos_ids: frozenset[int],
        *,
        by_id: bool = False,
        draft: SequenceModel | None = None,
    ) -> None:
        if draft is not None and draft.vocab_size != model.vocab_size:
            sizes = (
                f"the draft model has {draft.vocab_size} tokens and the target {model.vocab_size}"
            )
            raise OptionError(f"{sizes}; leave --draft out")
        self._model, self._draft, self._tokenizer, self._eos_ids = model, draft, tokenizer, eos_ids
        self._token_texts = TokenTexts(tokenizer)
        texts = list(map(self._token_texts.text, range(model.vocab_size)))
        names = [f"{TOKEN_ID}{i}" for i in range(model.vocab_size)] if by_id else texts
        self.eos_names = frozenset(names[i] for i in eos_ids)
        # Tokens that share a name cannot be told apart, and llama.cpp lists one token for all parts
        # of a character: they count as unnamed.
        often = {name for name, times in Counter(names).items() if times > 1}
        self._names = [
            END if i in eos_ids else "" if name in often or _UNNAMED in text else name
            for i, (name, text) in enumerate(zip(names, texts, strict=True))
        ]
        self._ids = {name: i for i, name in enumerate(self._names) if name not in {END, ""}}
        self._lock = asyncio.Lock()
        self._prompts: dict[str, list[int]] = {}

    async def laws(
        self,
        prompt: str,
        tokens: Sequence[str],
        rules: SamplingRules,
        *,
        is_structured: bool = False,
    ) -> list[TokenLaw | None]:
        return await one_at_a_time(self._lock, self._laws, prompt, tokens, rules, is_structured)

    async def noise(self, prompts: Sequence[str]) -> float:
        return 0.0

    @cached_property
    def _texts(self) -> list[str]:
        """The text of every token within a text; special tokens have none."""
        texts = self._token_texts
        return ["" if texts.is_skipped(i) else texts.text(i) for i in range(self._model.vocab_size)]

    @cached_property
    def _admitted(self) -> Tensor:
        """The tokens that a structured text admits after an even and an odd number of characters."""
        rows = torch.tensor([[goes_on(n, text) for text in self._texts] for n in range(2)])
        rows[:, sorted(self._eos_ids)] = torch.tensor([[may_end(n)] for n in range(2)])
        return rows

    def _laws(
        self, prompt: str, tokens: Sequence[str], rules: SamplingRules, is_structured: bool
    ) -> list[TokenLaw | None]:
        if prompt not in self._prompts:
            self._prompts[prompt] = list(token_ids_of(self._tokenizer, prompt))
        prompt_ids = self._prompts[prompt]
        ids = list[int]()
        for name in tokens[:-1]:
            if name not in self._ids:
                break
            ids.append(self._ids[name])
        admitted = None
        if is_structured:
            sizes = list(accumulate((len(self._texts[i]) for i in ids), initial=0))
            admitted = self._admitted[torch.tensor(sizes) % 2]
        with torch.inference_mode():
            text = (*prompt_ids, *ids)
            scores, *drafted = (
                torch.cat([*logits_along(network, text, len(prompt_ids) - 1)]).double()
                / rules.temperature
                for network in (self._model, self._draft)
                if network is not None
            )
            if admitted is not None:
                scores = scores.masked_fill(~admitted.to(scores.device), -torch.inf)
            if len(self._eos_ids) > 1:  # all ends of text are one token
                ends = sorted(self._eos_ids)
                together = torch.logsumexp(scores[:, ends], dim=-1)
                scores[:, ends] = -torch.inf
                scores[:, ends[0]] = together
            probs = torch.softmax(scores, dim=-1)
            values, ids = torch.topk(probs, min(_SORTED, scores.shape[-1]))
            rests = (1.0 - values.sum(dim=-1)).clamp(min=0.0)
            if ids.shape[-1] == self._model.vocab_size:
                rests.zero_()
        tempered = replace(rules, temperature=1.0)
        rows = zip(values.cpu().numpy(), ids.tolist(), rests.tolist(), strict=True)
        laws = [self._law(masses[masses > 0.0], row, rest, tempered) for masses, row, rest in rows]
        if admitted is not None:
            for place, (law, name) in enumerate(zip(laws, tokens, strict=False)):
                i = min(self._eos_ids) if name == END else self._ids.get(name)
                if law is not None and i is not None and not admitted[place, i]:
                    laws[place] = law.without(name)
        for logits in drafted:
            declared = logits.softmax(-1).cpu().numpy()
            laws = [law and self._beside(law, row) for law, row in zip(laws, declared, strict=True)]
        return laws

    def _beside(self, law: TokenLaw, masses: np.ndarray) -> TokenLaw:
        """Return a law that knows the masses of all tokens under a draft model's law."""
        ids = [sorted(self._eos_ids) if name == END else self._ids[name] for name in law.names]
        named = np.array([masses[i].sum() for i in ids])
        return replace(law, draft=np.append(named, max(0.0, 1.0 - named.sum())))

    def _law(
        self, probs: np.ndarray, ids: list[int], rest: float, rules: SamplingRules
    ) -> TokenLaw | None:
        names = [self._names[i] for i in ids[: len(probs)]]
        law = truncated(names, probs, rest, rules)
        if law is None or "" not in law.places:
            return law
        is_named = np.array([name != "" for name in law.names], dtype=bool)
        unnamed = float(law.probs[~is_named].sum())
        return TokenLaw(tuple(filter(None, law.names)), law.probs[is_named], law.rest + unnamed)


class ServerReference:
    """Laws from a server that returns log-probabilities.

    A single request gives the laws of a whole text if the server returns the log-probabilities of
    prompts (`echo` with `logprobs`). A server without `echo` that reads prompts of text and token
    ids, such as llama.cpp, gets a request for every token.

    Args:
        client: The server; speculation must be off.
        eos_names: Names of tokens that end a text.
        by_id: Both servers name tokens by their ids.
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
        self,
        prompt: str,
        tokens: Sequence[str],
        rules: SamplingRules,
        *,
        is_structured: bool = False,
    ) -> list[TokenLaw | None]:
        if is_structured:  # the most probable tokens may all be forbidden
            return []
        if prompt not in self._prompts:
            self._prompts[prompt] = await self._prompt_tokens(prompt)
        known = self._prompts[prompt]
        if known is None:
            return await self._next_laws(prompt, tokens, rules)
        # Of a text that is tokenized in another way, the longest beginning is judged that is
        # tokenized as it was generated. It depends on the earlier tokens only, since a beginning of
        # a canonical tokenization is canonical.
        # A token that ends inside a character has no text: those after it are not named by theirs.
        whole = tokens[:-1].index("") if "" in tokens[:-1] else len(tokens) - 1
        for end in range(whole, -1, -1):
            echoed, size = await self._echo(prompt, known, tokens[:end]), len(known) + end
            if echoed.tokens is not None and echoed.tokens[:size] == (*known, *tokens[:end]):
                return [self._law(top, rules) for top in echoed.top[len(known) : size + 1]]
        return []

    async def noise(self, prompts: Sequence[str]) -> float:
        questions = [(prompt, [END], SamplingRules()) for prompt in prompts]
        alone = [await self.laws(*question) for question in questions]
        crowd = await asyncio.gather(*(self.laws(*question) for question in questions))
        pairs = zip(chain(*alone), chain(*crowd), strict=True)
        differences = [_difference(a, b) for a, b in pairs if a is not None and b is not None]
        return max(differences, default=0.0)

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
        text = _ids((*known, *tokens)) if self._by_id and known else prompt + "".join(tokens)
        async with self._crowd:
            return await self._ask(text, echo=True)

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
        completion = await self._client.complete(
            prompt,
            max_tokens=1,
            temperature=1.0,
            logprobs=self._num_top,
            return_tokens_as_token_ids=True if self._by_id else None,
            **fields,
        )
        self.speculates |= completion.speculates
        return completion

    def _law(self, top: Any, rules: SamplingRules) -> TokenLaw | None:  # noqa: ANN401 (JSON)
        if not top:
            return None
        # Servers add the token of the text to the largest ones: cut off, or the categories would
        # depend on what was drawn.
        largest = sorted(top.items(), key=lambda pair: -pair[1])[: self._num_top]
        merged = dict[str, float]()
        for name, logprob in largest:
            if _is_part(name) and not rules.truncates:
                continue  # several parts of characters share this name: they count as unnamed
            category = END if name in self.eos_names else name
            merged[category] = float(np.logaddexp(merged.get(category, -np.inf), logprob))
        law = law_of_logprobs(merged, rules)
        # Of several tokens with this name, the server lists one: how many of them are kept is
        # unknown.
        return None if law is not None and any(map(_is_part, law.names)) else law


def _is_part(name: str) -> bool:
    """Return whether a server's name of a token is that of a part of a character."""
    return _UNNAMED in name or name.startswith(PART)


def _ids(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix(TOKEN_ID)) for name in names]


def _difference(a: TokenLaw, b: TokenLaw) -> float:
    shared = {name: place for place, name in enumerate(a.names[:4]) if name in b.places}
    ratios = [a.probs[place] / b.probs[b.places[name]] for name, place in shared.items()]
    return max((abs(float(np.log(ratio))) for ratio in ratios), default=0.0)
