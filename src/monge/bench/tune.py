"""Find the fastest parts for given prompts by successive halving: after every round the faster half stays."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import numpy as np

from monge.bench.arms import Arm, Call, MongeArm, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.bench.resamples import Estimate, Resamples
from monge.bench.runner import FAILURES, WARM_UP_TOKENS, OnCall
from monge.core.draws import SeededDraws
from monge.core.errors import OptionError
from monge.defaults import ADAPTIVE
from monge.draft.by_name import settings_of
from monge.engine.process import settle_objects

FIRST: Final = 2
"""Texts of every arm in the first round. Each later round has twice as many, up to all prompts."""
FINALISTS: Final = 3
"""Arms of the last round, beside plain decoding."""
FREE: Final = ("ngram", "suffix")
"""Drafters that need no model and no head."""
_PASS: Final = 100_003  # seeds of two passes over the prompts differ by this
_TREES: Final = (
    {"tree": "chain(8, 'top')"},
    {"tree": "best_first(num_nodes=16, depth=6)"},
    {"tree": "best_first(num_nodes=32, depth=8)"},
)
_DRAWN: Final = (
    {"tree": "chain(8)", "verifier": "block"},
    {"tree": "fixed_width((3, 2, 1, 1))", "verifier": "traversal"},
    {"tree": "fixed_width((3, 2, 1, 1))", "verifier": "rrs_without_replacement"},
)
_CONTROLLERS: Final = (ADAPTIVE, *(f"fixed(max_depth={depth})" for depth in (1, 2, 3, 5)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The prompts that all arms decode, and under which settings.

    Args:
        prompts: Token ids of the prompts.
        max_new_tokens: Most tokens of a text.
        temperature: 0 is greedy.
        truncation: Top-k, top-p and min-p, where they are set.
        eos_ids: Tokens that end a text.
        seed: Of all texts; arms share the seeds of their texts.
        repeats: Passes over the prompts in the last round.
    """

    prompts: TokenIds
    max_new_tokens: int
    temperature: float
    truncation: Mapping[str, float] = field(default_factory=dict[str, float])
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    repeats: int = 1

    def call(self, text: int) -> Call:
        """Return the call of a text; texts go through the prompts in turns."""
        turn, prompt = divmod(text, len(self.prompts))
        return Call(
            prompt_ids=(self.prompts[prompt],),
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            truncation=self.truncation,
            eos_ids=self.eos_ids,
            seed=self.seed + prompt + _PASS * turn,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Candidate:
    """An arm, and what was measured of it: seconds, tokens and rounds by text, in their order.

    A failure is the reason why it is not measured any further.
    """

    arm: Arm
    seconds: list[float] = field(default_factory=list[float])
    num_tokens: list[int] = field(default_factory=list[int])
    num_rounds: int = 0
    failure: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """All tokens by all seconds; 0 before the first text."""
        return sum(self.num_tokens) / sum(self.seconds) if self.seconds else 0.0

    @property
    def tokens_a_round(self) -> float:
        """Tokens by rounds of the target."""
        return sum(self.num_tokens) / max(1, self.num_rounds)

    def speedup(self, plain: "Candidate", num_prompts: int) -> Estimate:
        """Return the speed over that of plain decoding on the same texts, with an interval over prompts."""
        count = len(self.seconds)
        prompts = np.arange(count) % num_prompts
        tokens, others = (np.array(arm.num_tokens[:count], float) for arm in (self, plain))
        # Sampled texts of two arms may differ in length: what plain decoding takes for as many tokens.
        expected = np.array(plain.seconds[:count]) * tokens / np.maximum(others, 1.0)
        resamples = Resamples.draw(min(count, num_prompts), SeededDraws(0))
        return resamples.ratio(expected, np.array(self.seconds), prompts)


def grid(
    *, drafter: str | None, is_greedy: bool, further: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the settings that are tried beside plain decoding, as `monge.load` takes them.

    Args:
        drafter: The drafter of the draft model or of the head, if any.
        is_greedy: Whether texts are greedy.
        further: Drafters of the user.

    Raises:
        OptionError: If a drafter is unknown, or cannot be read.
    """
    settings: list[dict[str, str]] = [] if drafter is None else [{}]  # the defaults
    names = [*FREE, *([] if drafter is None else [drafter]), *further]
    for name in dict.fromkeys(names):
        if name == "none":
            continue  # plain decoding runs in every round
        has_tree = "tree" in settings_of(name)
        # A greedy target accepts the token that it ranks first: drawing candidates only misses it.
        shapes = (*_TREES, *(() if is_greedy else _DRAWN)) if has_tree else ({},)
        settings += [
            {"drafter": name, **shape, "controller": controller}
            for shape, controller in product(shapes, _CONTROLLERS)
        ]
    return settings


def label(settings: Mapping[str, object]) -> str:
    """Return a label of settings for tables."""
    return " ".join(map(str, settings.values())) or "the defaults"


def arms_of(settings: Sequence[Mapping[str, str]]) -> list[Arm]:
    """Return an arm for each of the settings."""
    return [MongeArm(name=label(parts), settings=parts) for parts in settings]


def rounds_for(num_arms: int, num_prompts: int, repeats: int) -> Iterator[tuple[int, int]]:
    """Yield arms beside plain decoding, and texts of each, of every round."""
    num_texts = FIRST
    while num_arms > FINALISTS:
        yield num_arms, min(num_texts, num_prompts)
        num_arms, num_texts = max(FINALISTS, -(-num_arms // 2)), 2 * num_texts
    yield num_arms, repeats * num_prompts


def lengths(
    pair: Pair, plain: Arm, work: Workload, *, on_text: Callable[[], None] = lambda: None
) -> list[int]:
    """Return the tokens that plain decoding writes for every prompt; `on_text` is called after each."""
    counts: list[int] = []
    for text in range(len(work.prompts)):
        (token_ids,) = plain.decode(pair, work.call(text)).token_ids
        counts.append(len(token_ids))
        on_text()
    return counts


def search(
    pair: Pair,
    plain: Arm,
    arms: Sequence[Arm],
    work: Workload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_call: OnCall = lambda *_: None,
) -> list[Candidate]:
    """Return all candidates, plain decoding among them: those of the most texts first, and of these the fastest.

    Every arm prepares itself and decodes a short text, uncounted. In every round all arms that are
    left decode the same texts, text by text and in rotating order, so that a slow minute slows all
    of them. The faster half by all texts so far stays. Plain decoding runs in every round.

    Args:
        pair: The networks.
        plain: Plain decoding.
        arms: What is compared with it.
        work: What they decode.
        clock: Seconds.
        on_call: As for `monge.bench.runner.measure`.

    Raises:
        OptionError: If plain decoding fails.
    """
    base = Candidate(arm=plain)
    candidates = [base, *(Candidate(arm=arm) for arm in arms)]
    planned = rounds_for(len(arms), len(work.prompts), work.repeats)
    on_call("starting", len(candidates) + sum((size + 1) * count for size, count in planned))
    try:
        for candidate in candidates:
            on_call(f"warming up {candidate.arm.name}")
            _warm_up(candidate, pair, work)
        _check(base)
        running, done = [arm for arm in candidates[1:] if arm.failure is None], 0
        rounds = list(rounds_for(len(running), len(work.prompts), work.repeats))
        for number, (size, count) in enumerate(rounds, start=1):
            running = sorted(running, key=lambda arm: -arm.tokens_per_s)[:size]
            name = f"round {number} of {len(rounds)}, {len(running)} settings"
            # A full collection would take longer than a text, in whichever arm it falls.
            settle_objects()
            for text in range(done, done + count):
                group = [base, *running]
                first = text % len(group)
                for candidate in (*group[first:], *group[:first]):
                    on_call(name)
                    _measure(candidate, pair, work.call(text), clock)
                _check(base)
                running = [arm for arm in running if arm.failure is None]
            done += count
    finally:
        gc.unfreeze()
    return sorted(candidates, key=lambda arm: (-len(arm.seconds), -arm.tokens_per_s))


def _warm_up(candidate: Candidate, pair: Pair, work: Workload) -> None:
    call = work.call(0)
    short = Call(
        prompt_ids=call.prompt_ids,
        max_new_tokens=min(WARM_UP_TOKENS, call.max_new_tokens),
        temperature=call.temperature,
        truncation=call.truncation,
        seed=call.seed,
    )
    try:
        candidate.arm.prepare(pair)
        candidate.arm.decode(pair, short)
        synchronize(pair)
    except FAILURES as error:
        candidate.failure = str(error)


def _measure(candidate: Candidate, pair: Pair, call: Call, clock: Callable[[], float]) -> None:
    start = clock()
    try:
        decoded = candidate.arm.decode(pair, call)
        synchronize(pair)
    except FAILURES as error:
        candidate.failure = str(error)
        return
    candidate.seconds.append(clock() - start)
    candidate.num_tokens.append(sum(map(len, decoded.token_ids)))
    candidate.num_rounds += len(decoded.records)


def _check(plain: Candidate) -> None:
    if plain.failure is not None:
        raise OptionError(f"plain decoding failed, so nothing can be compared: {plain.failure}")
