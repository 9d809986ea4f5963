"""One audit from the first request to the verdict."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from monge.audit.bets import Wealth, judged, log_factors
from monge.audit.client import TOKEN_ID, Completion, RefusedError, Server, ServerError
from monge.audit.deterministic import Deterministic, deterministic
from monge.audit.log import TextLog
from monge.audit.power import smallest_deviation
from monge.audit.references import Reference, ServerReference, token_names
from monge.audit.report import Report, SituationResult, Tally
from monge.audit.situations import Situation, situations
from monge.audit.token_law import END, TokenLaw
from monge.core.draws import random_numbers
from monge.core.words import counted

ALPHA: Final = 0.001
BUDGET: Final = 20_000
QUICK_BUDGET: Final = 2_000
_MIN_TOKENS: Final = 500
"""Fewer judged tokens give no verdict."""

_MIN_ENDS: Final = 5
"""Ends of text without a name in any distribution that are no chance: their name is unknown."""

_MOST_TEXTS: Final = 2.0  # texts of a situation, in multiples of those that its budget fills
_SEEDS: Final = 1_000_000  # seeds of one situation
_CURVE_POINTS: Final = 200
_AHEAD: Final = 4  # texts in work, in multiples of the requests at once

_NUM_PROBES: Final = 16
_TEXT_NOTE: Final = (
    "the server returns no tokens, so that only first tokens were judged, which most engines draw "
    "without speculation; an "
    "audit needs `logprobs` on /v1/completions"
)

_NEUTRAL: Final[Mapping[str, float]] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
"""Values that switch sampling rules off.

Left out, they mean 1 or nothing in some servers, and defaults of the server or of the checkpoint in
others. Such a default is no fault of speculation.
"""

Naming = Literal["ids", "names", "text"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an audit goes.

    Args:
        budget: Sampled tokens to judge at most.
        alpha: Largest probability of a false alarm.
        tolerance: Smallest difference of two log-probabilities that counts in greedy texts, in
            nats.
        played: The situations.
        seed: Of the numbers that break ties, and of requests with seeds.
        naming: How the audited server names tokens, as `probe` says. Of servers that return no
            tokens, only the first token of each text is judged.
        neutral: Fields of every request that switch sampling rules off, as `neutral_fields` says.
        log: File for the texts.
        greedy_budget: Greedy tokens to compare at least; one text for each prompt is always
            compared.
        seconds: Longest time for the sampled texts; `None` for no limit. E-values stay valid at
            any stop.
    """

    budget: int = BUDGET
    alpha: float = ALPHA
    tolerance: float = 0.05
    played: tuple[Situation, ...] = situations()
    seed: int = 0
    naming: Naming = "names"
    neutral: Mapping[str, object] = field(default_factory=dict)
    log: Path | None = None
    greedy_budget: int = 0
    seconds: float | None = None


async def probe(client: Server, prompt: str) -> Naming:
    """Ask a server for short texts, to see how it names tokens.

    Raises:
        ServerError: If it cannot be reached, or returns empty texts only.
    """
    fields = {
        "max_tokens": 4,
        "temperature": 1.0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    for _ in range(_NUM_PROBES):  # some texts end at once
        try:
            found = await client.complete(prompt, **fields)
        except RefusedError:
            if "return_tokens_as_token_ids" not in fields:
                raise
            del fields["return_tokens_as_token_ids"]
            continue
        if found.tokens:
            return "ids" if all(name.startswith(TOKEN_ID) for name in found.tokens) else "names"
        if found.tokens is None and found.text:
            return "text"
    raise ServerError(f"{client.url} returned {_NUM_PROBES} empty texts for the prompt {prompt!r}")


async def neutral_fields(client: Server, prompt: str) -> dict[str, object]:
    """The fields that switch sampling rules off, as far as a server takes them."""
    found = dict[str, object]()
    for name, value in _NEUTRAL.items():
        with suppress(ServerError):
            await client.complete(prompt, max_tokens=1, temperature=1.0, **{name: value})
            found[name] = value
    return found


async def audit(
    client: Server,
    reference: Reference,
    settings: Settings = Settings(),
    *,
    on_tokens: Callable[[int, float], None] | None = None,
) -> Report:
    """Judge a server.

    Args:
        client: The audited server.
        reference: The reference.
        settings: How.
        on_tokens: Told the judged tokens and the logarithm of the e-value after every text.
    """
    notes = list[str]()
    if settings.naming == "text":
        settings = replace(
            settings, played=tuple(replace(one, max_tokens=1) for one in settings.played)
        )
        notes.append(_TEXT_NOTE)
    longest = max(settings.played, key=lambda one: (one.max_tokens, len(one.prompts)))
    fields = request_fields(longest.max_tokens, settings.naming)
    first = await deterministic(
        client,
        reference,
        longest.prompts,
        fields={**settings.neutral, **fields},
        tolerance=settings.tolerance,
        num_greedy_tokens=settings.greedy_budget,
    )
    if not first.same_logprobs:
        notes.append("the server's log-probabilities are not those of the reference")
    if (early := _early_verdict(first, settings, notes)) is not None:
        return early
    header = {"url": client.url, "model": client.model, "seed": settings.seed}
    log = TextLog(settings.log, header)
    sampled = _Sampled(client, reference, settings, log, on_tokens)
    try:
        await sampled.play()
    finally:
        log.close()
    if isinstance(reference, ServerReference) and reference.speculates:
        notes.append(
            "the reference server reports speculation: prove that it is lossless, or "
            "switch its speculation off"
        )
    return sampled.report(first, notes)


def request_fields(max_tokens: int, naming: Naming) -> dict[str, object]:
    """Fields that ask for tokens."""
    names: dict[str, object] = {} if naming == "text" else {"logprobs": 1}
    return (
        {"max_tokens": max_tokens}
        | names
        | ({"return_tokens_as_token_ids": True} if naming == "ids" else {})
    )


def _early_verdict(first: Deterministic, settings: Settings, notes: Sequence[str]) -> Report | None:
    if not first.same_weights:
        reason = (
            "the server and the reference do not run the same weights: their greedy first tokens "
            "or log-probabilities differ"
        )
        return Report(
            verdict="could not be judged",
            reason=reason,
            alpha=settings.alpha,
            deterministic=first,
            notes=tuple(notes),
        )
    if first.differences:
        worst = max(first.differences, key=lambda one: one.gap)
        reason = (
            f"greedy text: after {worst.position} tokens of {worst.prompt!r} the server wrote "
            f"{worst.got!r}, which is "
            f"{worst.gap:.2f} nats less probable than {worst.expected!r}"
        )
        return Report(
            verdict="not lossless",
            reason=reason,
            alpha=settings.alpha,
            deterministic=first,
            notes=tuple(notes),
        )
    return None


class _Sampled:
    """The sampled texts of all situations, and the bets on them."""

    def __init__(
        self,
        client: Server,
        reference: Reference,
        settings: Settings,
        log: TextLog,
        on_tokens: Callable[[int, float], None] | None,
    ) -> None:
        self._client, self._reference, self._settings, self._log, self._on_tokens = (
            client,
            reference,
            settings,
            log,
            on_tokens,
        )
        self._joint, self._tally = Wealth(), Tally()
        self._own = {situation.name: Wealth() for situation in settings.played}
        # Texts of two situations never share a seed: they would repeat each other.
        self._seeds = {
            name: settings.seed + _SEEDS * number for number, name in enumerate(self._own)
        }
        self._texts = dict.fromkeys(self._own, 0)
        self._num_short = 0
        self._num_ends, self._names_ends = 0, False
        self._peak = 0.0
        self._curve = list[tuple[int, float]]()

    @property
    def is_rejected(self) -> bool:
        """Whether the joint e-process has reached its bound."""
        return self._peak >= math.log(1.0 / self._settings.alpha)

    async def play(self) -> None:
        """Play all situations, or stop at a rejection."""
        shares = sum(situation.share for situation in self._settings.played)
        for number, situation in enumerate(self._settings.played):
            share = situation.share / shares
            budget = self._settings.budget * share
            end = time.monotonic() + (self._settings.seconds or math.inf) * share
            most_texts = math.ceil(_MOST_TEXTS * budget / situation.max_tokens)
            limit = asyncio.Semaphore(situation.concurrency)
            makers = (self._text(situation, index, limit) for index in range(most_texts))
            index = 0
            # Texts are judged in the order of their requests: the order of arrival depends on what
            # was drawn.
            try:
                async with aclosing(in_order(makers, _AHEAD * situation.concurrency)) as texts:
                    async for completion, laws in texts:
                        self._judge(number, situation, index, completion, laws)
                        index += 1
                        if self.is_rejected:
                            return
                        is_late = time.monotonic() >= end
                        if is_late or self._own[situation.name].num_tokens >= budget:
                            break
            except ServerError as error:
                raise type(error)(
                    f"{error} (in situation {situation.name!r}, after "
                    f"{counted(self._joint.num_tokens, 'judged token')})"
                ) from error

    def report(self, first: Deterministic, notes: Sequence[str]) -> Report:
        """The verdict."""
        settings, num_tokens = self._settings, self._joint.num_tokens
        # Which does not say what ends a text.
        is_server = isinstance(self._reference, ServerReference)
        bound = math.log(1.0 / settings.alpha)
        results = tuple(
            SituationResult(
                name=name,
                num_texts=self._texts[name],
                num_tokens=own.num_tokens,
                log_e=math.inf if own.num_impossible else own.peak,
                finding=own.finding() if own.peak >= bound else None,
            )
            for name, own in self._own.items()
        )
        smallest = smallest_deviation(num_tokens, alpha=settings.alpha)
        if is_server and self._num_ends >= _MIN_ENDS and not self._names_ends:
            verdict = "could not be judged"
            reason = "texts end, but no reference distribution names an end of text; give its name with --eos"
        elif self.is_rejected:
            richest = max((self._joint, *self._own.values()), key=lambda one: one.peak)
            where = [name for name, own in self._own.items() if own is richest]
            verdict, reason = (
                "not lossless",
                richest.finding() + (f" (in situation {where[0]!r})" if where else ""),
            )
        elif settings.naming == "text":
            verdict, reason = (
                "could not be judged",
                "first tokens show no deviation, but the server returns no tokens",
            )
        elif num_tokens < min(_MIN_TOKENS, settings.budget):
            verdict, reason = (
                "could not be judged",
                f"tokens with a known reference distribution: only {num_tokens}",
            )
        else:
            verdict = "lossless"
            reason = (
                f"no deviation found; {num_tokens} tokens show a mean total variation of "
                f"{smallest:.3f} with probability 0.9"
            )
        if self._num_short:
            notes = (
                *notes,
                f"texts that are shorter than asked for, without an end of text: {self._num_short}",
            )
        step = max(1, len(self._curve) // _CURVE_POINTS)
        return Report(
            verdict=verdict,
            reason=reason,
            alpha=settings.alpha,
            num_tokens=num_tokens,
            log_e=self._peak,
            smallest_deviation=smallest,
            situations=results,
            deterministic=first,
            quantiles=self._tally.quantiles(),
            ranks=self._tally.ranks(),
            curve=tuple(self._curve[::step]),
            notes=tuple(notes),
        )

    async def _text(
        self, situation: Situation, index: int, limit: asyncio.Semaphore
    ) -> tuple[Completion, list[TokenLaw | None]]:
        prompt, rules = situation.prompts[index % len(situation.prompts)], situation.rules
        completion = self._log.find(situation.name, index)
        if completion is None:
            async with limit:
                asked = dict(self._settings.neutral)
                if rules.top_p < 1:
                    asked["top_p"] = float(rules.top_p)
                if rules.top_k is not None:
                    asked["top_k"] = rules.top_k
                completion = await self._client.complete(
                    prompt,
                    temperature=float(rules.temperature),
                    seed=self._seeds[situation.name] + index if situation.is_seeded else None,
                    **asked,
                    **request_fields(situation.max_tokens, self._settings.naming),
                )
            self._log.keep(situation.name, index, completion)
        names = token_names(completion, self._reference.eos_names)
        return completion, await self._reference.laws(prompt, names, rules) if names else []

    def _judge(
        self,
        number: int,
        situation: Situation,
        index: int,
        completion: Completion,
        laws: Sequence[TokenLaw | None],
    ) -> None:
        prompt = situation.prompts[index % len(situation.prompts)]
        names = token_names(completion, self._reference.eos_names)
        numbers = (
            random_numbers(self._settings.seed, number, place=index).random(len(names)).tolist()
        )
        text = judged(laws, names, numbers)
        factors = log_factors(text)
        key = f"{prompt}\n{situation.rules}"
        own = self._own[situation.name]
        self._joint.add(key, names, text, factors)
        own.add(key, names, text, factors)
        self._tally.add(text)
        self._texts[situation.name] += 1
        self._num_ends += names[-1:] == (END,)
        self._names_ends |= any(END in law.places for law in laws if law is not None)
        self._num_short += completion.finish == "length" and len(names) < situation.max_tokens
        log_e = self._log_e()
        self._peak = max(self._peak, log_e)
        self._curve.append((self._joint.num_tokens, log_e))
        if self._on_tokens is not None:
            self._on_tokens(self._joint.num_tokens, self._peak)

    def _log_e(self) -> float:
        """Half of the stake lies on bets on all texts together, the other half on each situation apart."""
        logs = [
            self._joint.log_e,
            *(own.log_e - math.log(len(self._own)) for own in self._own.values()),
        ]
        if math.inf in logs:
            return math.inf
        largest = max(logs)
        return (
            largest
            + math.log(math.fsum(math.exp(value - largest) for value in logs))
            - math.log(2.0)
        )


async def in_order(makers: Iterable[Awaitable[T]], ahead: int) -> AsyncGenerator[T, None]:
    """The results of coroutines in the order of the coroutines, with so many in work at a time."""
    waiting, source = deque[asyncio.Task[T]](), iter(makers)
    try:
        while True:
            while len(waiting) < ahead and (maker := next(source, None)) is not None:
                waiting.append(asyncio.ensure_future(maker))
            if not waiting:
                return
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
