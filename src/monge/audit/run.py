"""An audit from the first request to the verdict."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from monge.audit.bets import Wealth, judged, log_factors, smallest_deviation
from monge.audit.client import RefusedError, Server, ServerError
from monge.audit.deterministic import FirstStages, deterministic
from monge.audit.references import Reference, ServerReference, token_names
from monge.audit.report import Report, SituationResult, Tally, Verdict
from monge.audit.settings import AuditSettings, Naming
from monge.audit.situations import Situation
from monge.audit.text_log import TextLog
from monge.audit.token_law import END, TokenLaw
from monge.core.sampling_rules import SamplingRules
from monge.core.words import counted
from monge.laws.draws import random_numbers
from monge.requests.text import TOKEN_ID

TOLERANCE: Final = 0.05
"""Smallest difference of two log-probabilities that counts in greedy texts, in nats."""
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
    "without speculation; an audit needs `logprobs` on /v1/completions"
)
_NO_FIELD_NOTE: Final = (
    "no structured requests were judged: with none of the known fields do the server's texts follow "
    "a regex"
)
_NO_LAW_NOTE: Final = (
    "no structured requests were judged: a reference server names its most probable tokens only, "
    "which a regex may forbid; give --target instead"
)
_NEUTRAL: Final[Mapping[str, float]] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
"""Values that switch sampling rules off.

Left out, they mean 1 or nothing in some servers, and defaults of the server or of the checkpoint in
others. Such a default is no fault of speculation.
"""

T = TypeVar("T")


async def probe(client: Server, prompt: str) -> Naming:
    """Ask a server for short texts, and return how it names tokens.

    Raises:
        ServerError: If it cannot be reached, or returns empty texts only.
    """
    fields = {"max_tokens": 4, "temperature": 1.0, "logprobs": 1}
    by_id = {"return_tokens_as_token_ids": True}
    for _ in range(_NUM_PROBES):  # some texts end at once
        try:
            completion = await client.complete(prompt, **fields, **by_id)
        except RefusedError:
            if not by_id:
                raise
            by_id = {}
            continue
        if names := completion.tokens:
            return "ids" if all(name.startswith(TOKEN_ID) for name in names) else "names"
        if names is None and completion.text:
            return "text"
    raise ServerError(f"{client.url} returned {_NUM_PROBES} empty texts for the prompt {prompt!r}")


async def neutral_fields(client: Server, prompt: str) -> dict[str, object]:
    """Return the fields that switch sampling rules off, as far as a server takes them."""
    fields = dict[str, object]()
    for name, value in _NEUTRAL.items():
        with suppress(ServerError):
            await client.complete(prompt, max_tokens=1, temperature=1.0, **{name: value})
            fields[name] = value
    return fields


async def audit(
    client: Server,
    reference: Reference,
    settings: AuditSettings,
    *,
    on_tokens: Callable[[int, float], None] | None = None,
) -> Report:
    """Judge a server, and return the report.

    `on_tokens` receives the judged tokens and the logarithm of the e-value after every text.
    """
    notes = [_TEXT_NOTE] if settings.naming == "text" else []
    if len(settings.played) < len(settings.planned):
        is_server = isinstance(reference, ServerReference)
        notes.append(_NO_LAW_NOTE if is_server else _NO_FIELD_NOTE)
    longest = max(
        settings.played, key=lambda situation: (situation.max_tokens, len(situation.prompts))
    )
    first = await deterministic(
        client,
        reference,
        longest.prompts,
        fields=settings.fields(longest.max_tokens),
        tolerance=TOLERANCE if settings.tolerance is None else settings.tolerance,
        num_greedy_tokens=settings.greedy_budget,
    )
    if not first.same_logprobs:
        notes.append("the server's log-probabilities are not those of the reference")
    if (early := _early_verdict(first)) is not None:
        details: dict[str, Any] = {"alpha": settings.alpha, "notes": tuple(notes)}
        return Report(verdict=early[0], reason=early[1], deterministic=first, **details)
    header = {"url": client.url, "model": client.model, "seed": settings.seed}
    with closing(TextLog(settings.log, header)) as log:
        sampled = _SampledTexts(client, reference, settings, log, on_tokens)
        await sampled.judge_all()
    if isinstance(reference, ServerReference) and reference.speculates:
        notes.append(
            "the reference server reports speculation: prove that it is lossless, or "
            "switch its speculation off"
        )
    return sampled.report(first, notes)


def _early_verdict(first: FirstStages) -> tuple[Verdict, str] | None:
    if not first.same_weights:
        return "could not be judged", (
            "the server and the reference do not run the same weights: their greedy first tokens "
            "or log-probabilities differ"
        )
    if not first.differences:
        return None
    worst = max(first.differences, key=lambda difference: difference.gap)
    return "not lossless", (
        f"greedy text: after {worst.position} tokens of {worst.prompt!r} the server wrote "
        f"{worst.got!r}, which is {worst.gap:.2f} nats less probable than {worst.expected!r}"
    )


class _SampledTexts:
    """The sampled texts of all situations, and the bets on them."""

    def __init__(
        self,
        client: Server,
        reference: Reference,
        settings: AuditSettings,
        log: TextLog,
        on_tokens: Callable[[int, float], None] | None,
    ) -> None:
        self._client, self._reference, self._settings = client, reference, settings
        self._log, self._on_tokens = log, on_tokens
        self._played = {situation.name: situation for situation in settings.played}
        self._joint, self._tally = Wealth(), Tally()
        self._apart = {name: Wealth() for name in self._played}
        total = sum(situation.share for situation in self._played.values())
        self._shares = {name: part.share / total for name, part in self._played.items()}
        self._num_short, self._num_ends, self._names_ends = 0, 0, False
        self._peak, self._bound = 0.0, math.log(1.0 / settings.alpha)
        self._curve = list[tuple[int, float]]()

    @property
    def is_rejected(self) -> bool:
        """Return whether the joint e-process has reached its bound."""
        return self._peak >= self._bound

    async def judge_all(self) -> None:
        """Judge texts of all situations, or stop at a rejection."""
        for number, situation in enumerate(self._played.values()):
            try:
                await self._judge_situation(number, situation, self._shares[situation.name])
            except ServerError as error:
                raise type(error)(
                    f"{error} (in situation {situation.name!r}, after "
                    f"{counted(self._joint.num_tokens, 'judged token')})"
                ) from error
            if self.is_rejected:
                return

    async def _judge_situation(self, number: int, situation: Situation, share: float) -> None:
        budget, minutes = self._settings.num_tokens * share, self._settings.minutes
        end = time.monotonic() + (math.inf if minutes is None else 60.0 * minutes) * share
        most_texts = math.ceil(_MOST_TEXTS * budget / situation.max_tokens)
        limit = asyncio.Semaphore(situation.concurrency)
        makers = (self._text(number, situation, index, limit) for index in range(most_texts))
        # Texts are judged in the order of their requests: the order of arrival depends on what was
        # drawn.
        async with aclosing(in_order(makers, _AHEAD * situation.concurrency)) as texts:
            async for index, names, is_cut, laws in texts:
                ties = random_numbers(self._settings.seed, number, place=index).random(len(names))
                text = judged(laws, names, ties.tolist())
                factors = log_factors(text)
                kind = repr((*situation.request(index), situation.is_structured))
                for wealth in (self._joint, self._apart[situation.name]):
                    wealth.add(kind, names, text, factors)
                self._tally.add(text)
                self._num_ends += names[-1:] == (END,)
                self._names_ends |= any(END in law.places for law in laws if law is not None)
                self._num_short += is_cut and len(names) < situation.max_tokens
                log_e = self._log_e()
                self._peak = max(self._peak, log_e)
                self._curve.append((self._joint.num_tokens, log_e))
                if self._on_tokens is not None:
                    self._on_tokens(self._joint.num_tokens, self._peak)
                is_full = self._apart[situation.name].num_tokens >= budget
                if self.is_rejected or is_full or time.monotonic() >= end:
                    return

    async def _text(
        self, number: int, situation: Situation, index: int, limit: asyncio.Semaphore
    ) -> tuple[int, tuple[str, ...], bool, list[TokenLaw | None]]:
        """Return a text: its number, its tokens, if it was cut at its longest, and its laws."""
        prompt, rules = situation.request(index)
        completion = self._log.find(situation.name, index)
        if completion is None:
            fields = self._settings.fields(situation.max_tokens)
            if situation.is_structured:
                fields |= self._settings.structured
            if rules.top_p < 1:
                fields["top_p"] = float(rules.top_p)
            if rules.top_k is not None:
                fields["top_k"] = rules.top_k
            # Texts of two situations never share a seed: they would repeat each other.
            seed = self._settings.seed + _SEEDS * number + index
            fields["temperature"] = float(rules.temperature)
            fields["seed"] = seed if situation.is_seeded else None
            async with limit:
                completion = await self._client.complete(prompt, **fields)
            self._log.keep(situation.name, index, completion)
        names = token_names(completion, self._reference.eos_names)
        if rules.temperature == 0:  # the greedy token is the first of top-k 1, but for near-ties
            rules = SamplingRules(top_k=1)
        laws = list[TokenLaw | None]()
        if names:
            laws = await self._reference.laws(
                prompt, names, rules, is_structured=situation.is_structured
            )
        return index, names, completion.finish == "length", laws

    def _log_e(self) -> float:
        """Return the joint e-value: half of the stake lies on all texts together, half on the situations by their shares."""
        apart = [
            wealth.log_e + math.log(self._shares[name]) for name, wealth in self._apart.items()
        ]
        return float(np.logaddexp(self._joint.log_e, np.logaddexp.reduce(apart))) - math.log(2.0)

    def report(self, first: FirstStages, notes: Sequence[str]) -> Report:
        """Return the report."""
        smallest = smallest_deviation(self._joint.num_tokens, alpha=self._settings.alpha)
        verdict, reason = self._verdict(smallest)
        if self._num_short:
            short = "texts that are shorter than asked for, without an end of text"
            notes = (*notes, f"{short}: {self._num_short}")
        return Report(
            verdict=verdict,
            reason=reason,
            alpha=self._settings.alpha,
            num_tokens=self._joint.num_tokens,
            log_e=self._peak,
            smallest_deviation=smallest,
            situations=tuple(
                SituationResult(
                    name=name,
                    num_texts=wealth.num_texts,
                    num_tokens=wealth.num_tokens,
                    log_e=math.inf if wealth.num_impossible else wealth.peak,
                    finding=wealth.finding() if wealth.peak >= self._bound else None,
                )
                for name, wealth in self._apart.items()
            ),
            deterministic=first,
            **self._tally.figures(),
            curve=tuple(self._curve[:: max(1, len(self._curve) // _CURVE_POINTS)]),
            notes=tuple(notes),
        )

    def _verdict(self, smallest: float) -> tuple[Verdict, str]:
        num_tokens = self._joint.num_tokens
        is_server = isinstance(self._reference, ServerReference)
        if is_server and self._num_ends >= _MIN_ENDS and not self._names_ends:
            return "could not be judged", (
                "texts end, but no reference distribution names an end of text; give its name with --eos"
            )
        if self.is_rejected:
            named = {"": self._joint} | {
                f" (in situation {name!r})": wealth for name, wealth in self._apart.items()
            }
            where, richest = max(named.items(), key=lambda entry: entry[1].peak)
            return "not lossless", richest.finding() + where
        if self._settings.naming == "text":
            return "could not be judged", (
                "first tokens show no deviation, but the server returns no tokens"
            )
        if num_tokens < min(_MIN_TOKENS, self._settings.num_tokens // 2):
            return "could not be judged", (
                f"tokens with a known reference distribution: only {num_tokens}"
            )
        return "lossless", (
            f"no deviation found; {num_tokens} tokens show a mean total variation of "
            f"{smallest:.3f} with probability 0.9"
        )


async def in_order(makers: Iterable[Awaitable[T]], ahead: int) -> AsyncGenerator[T, None]:
    """Yield the results of coroutines in their order, with `ahead` of them in work at a time."""
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
