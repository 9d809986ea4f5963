"""Measure arms side by side: interleaved, repeated, in rotating order, with failures that stay failures."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, Final

from monge.bench.arms import Arm, Call, DecodedCall, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.bench.resamples import Estimate
from monge.bench.statistics import ratio_of_sums
from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.laws.draws import check_seed
from monge.options import MEASURING, LengthAndTruncation, changed, option
from monge.runtime.clock import measured_by
from monge.runtime.process import settle_objects

OnCall = Callable[..., None]
"""Callback `on_call(name)` before each call of a benchmark; `on_call(name, total)` announces their number."""

Work = Callable[[], float]
"""Does the work once, and returns its seconds."""

FAILURES: Final = (MongeError, RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors of hosts and arms that cannot decode; any other error is a fault of the benchmark and ends it."""

WARM_UP_TOKENS: Final = 16
_WARM_UPS: Final = 3  # in the first, graphs are captured; what comes later may move their memory
_PASS: Final = 100_003  # seeds of two passes over the prompts differ by this
NOT_APPLICABLE: Final = "not applicable"

CLOCKS: Final[Mapping[str, Callable[[], float]]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}
"""Wall-clock time, or processor time of all threads of this process.

The second leaves out the turns of other processes, so it also compares arms on a busy machine; it
does not see a device, or how well threads share the work.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(LengthAndTruncation):
    """Settings of a comparison, which are options of `monge bench decode`.

    The warm-up comes on top of the repeats. Every repeat and batch derives its own seed, the same
    for all arms. No repeat is started that would end after the time limit; the first always ends.
    Controllers measure by the same clock, a member of `CLOCKS`.
    """

    max_new_tokens: int = option(64, MEASURING, "Length of every completion.")
    repeats: int = option(3, MEASURING, "Measured passes over the prompts.")
    batch_sizes: tuple[int, ...] = option(
        (1, 4, 8), MEASURING, "Batch size; may be repeated.", flags=("--batch",)
    )
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0), MEASURING, "0 is greedy; may be repeated.", flags=("--temperature",)
    )
    seed: int = option(0, MEASURING, "Seed of the sampled arms.")
    time_limit_s: float | None = option(
        None,
        MEASURING,
        "Start no further repeat after so many seconds.",
        "none",
        kind=float,
        flags=("--time-limit",),
    )
    clock: str = option(
        "wall", MEASURING, "`wall`, or `cpu`: processor time of this process, for a busy machine."
    )

    def __post_init__(self) -> None:
        count_once(self, "batch_sizes", "temperatures")
        if self.clock not in CLOCKS:
            raise unknown_name("clock", self.clock, CLOCKS)
        for temperature in self.temperatures:
            SamplingRules(temperature=temperature, **self.truncation)
        if self.time_limit_s is not None and not self.time_limit_s >= 0:
            raise OptionError(
                f"bench: the time limit must not be negative; got {self.time_limit_s}"
            )
        check_seed(self.seed)
        sizes = (self.max_new_tokens, self.repeats, *self.batch_sizes)
        if min(sizes) < 1 or not self.batch_sizes or not self.temperatures:
            raise OptionError(
                f"bench: numbers of tokens, repeats and batch sizes must be at least 1; got {sizes}"
            )

    @property
    def truncation(self) -> dict[str, Any]:
        """Top-k, top-p and min-p, where they are set."""
        values = changed(self)
        return {name: values[name] for name in ("top_k", "top_p", "min_p") if name in values}


def count_once(settings: object, *names: str) -> None:
    """Leave out repeated values of some settings: a cell that is named twice is measured once."""
    for name in names:
        object.__setattr__(settings, name, tuple(dict.fromkeys(getattr(settings, name))))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The prompts that arms decode at a temperature and batch size.

    Args:
        prompts: Token ids of the prompts.
        max_new_tokens: Most tokens of a text.
        temperature: 0 is greedy.
        batch_size: Rows of a call.
        truncation: Top-k, top-p and min-p, where they are set.
        eos_ids: Tokens that end a text. Without them, every text has the full length.
        seed: Of all texts; arms share the seeds of their texts.
        repeats: Passes over the prompts.
    """

    prompts: TokenIds
    max_new_tokens: int
    temperature: float
    batch_size: int = 1
    truncation: Mapping[str, float] = field(default_factory=dict[str, float])
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    repeats: int = 1

    @cached_property
    def batches(self) -> list[TokenIds]:
        """Full batches of all prompts; the last batch is filled up with the first prompts."""
        size, count = self.batch_size, len(self.prompts)
        return [
            tuple(self.prompts[row % count] for row in range(first, first + size))
            for first in range(0, count, size)
        ]

    def call(self, number: int) -> Call:
        """Return a call; calls go through the batches in turns, and every pass has its own seeds."""
        turn, batch = divmod(number, len(self.batches))
        return Call(
            prompt_ids=self.batches[batch],
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            truncation=self.truncation,
            eos_ids=self.eos_ids,
            seed=self.seed + batch + _PASS * turn,
        )


@dataclass(slots=True, kw_only=True)
class Measurement:
    """An arm and its workload: seconds and new tokens of every call, in the same order for all arms.

    Completions are the tokens of every row of every call. A failure is the reason why there are no
    numbers.
    """

    arm: Arm
    work: Workload
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    completions: list[tuple[int, ...]] = field(default_factory=list)
    failure: str | None = None

    @property
    def place(self) -> dict[str, Any]:
        """Temperature and batch size."""
        return {"temperature": self.work.temperature, "batch_size": self.work.batch_size}

    @property
    def speed(self) -> float:
        """All tokens by all seconds; 0 before the first call."""
        return sum(self.num_tokens) / sum(self.seconds) if self.seconds else 0.0

    @property
    def seconds_of_repeats(self) -> list[float]:
        """Seconds of every pass over the prompts."""
        return self._by_repeat(self.seconds)

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of every repeat: all tokens / all seconds of its calls."""
        pairs = zip(self._by_repeat(self.num_tokens), self.seconds_of_repeats, strict=True)
        return tuple(tokens / seconds for tokens, seconds in pairs)

    def fail(self, reason: str) -> None:
        """Record why there are no numbers, and drop earlier numbers."""
        self.failure = reason
        for numbers in (self.seconds, self.num_tokens, self.records, self.completions):
            numbers.clear()

    def speedup(self, plain: "Measurement", num_clusters: int) -> Estimate:
        """Return the speed over that of another arm in the same calls, with an interval.

        Texts of two arms may differ in length: the other arm's seconds are scaled to as many tokens.

        Args:
            plain: The other arm.
            num_clusters: Calls that are as many apart decode the same prompts, which are resampled.
        """
        tokens, others = self.num_tokens, plain.num_tokens[: len(self.seconds)]
        expected = [
            seconds * mine / max(1, other)
            for seconds, mine, other in zip(plain.seconds, tokens, others, strict=False)
        ]
        clusters = [call % num_clusters for call in range(len(tokens))]
        return ratio_of_sums(expected, self.seconds, clusters)

    def _by_repeat(self, numbers: Sequence[float]) -> list[float]:
        count = len(self.work.batches)
        return [sum(numbers[first : first + count]) for first in range(0, len(numbers), count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Lets arms decode the same calls in turns, so that a slow minute of the machine slows all of them.

    Args:
        pair: The networks.
        clock: Seconds, by which controllers measure too.
        on_call: As for `measure`.
    """

    pair: Pair
    clock: Callable[[], float]
    on_call: OnCall

    @contextmanager
    def running(self, cells: Sequence[Sequence[Measurement]]) -> Iterator[None]:
        """Prepare every arm once, and let it decode a short text in each cell, uncounted."""
        measurements, prepared = list(chain.from_iterable(cells)), set[int]()
        with measured_by(self.clock):
            try:
                for measurement in measurements:
                    if id(measurement.arm) not in prepared:
                        prepared.add(id(measurement.arm))
                        self._prepare(measurement.arm, measurements)
                    self._warm_up(measurement)
                yield
            finally:
                gc.unfreeze()

    def take_turns(self, cell: Sequence[Measurement], call: int, name: str | None = None) -> None:
        """Let all arms of a cell decode a call; no arm always follows the same arm.

        Args:
            cell: Measurements of one workload.
            call: Its number.
            name: What `on_call` is told, instead of the arm's name.
        """
        first = sum(divmod(call, len(cell[0].work.batches))) % len(cell)
        for measurement in (*cell[first:], *cell[:first]):
            decoded = self._decode(measurement, measurement.work.call(call), name)
            if decoded is None:
                continue
            output, seconds = decoded
            measurement.seconds.append(seconds)
            measurement.num_tokens.append(sum(map(len, output.token_ids)))
            measurement.records += output.records
            measurement.completions += output.token_ids

    def _prepare(self, arm: Arm, measurements: Sequence[Measurement]) -> None:
        try:
            arm.prepare(self.pair)
        except FAILURES as error:
            for measurement in measurements:
                if measurement.arm is arm:
                    measurement.fail(f"{type(error).__name__}: {error}")

    def _warm_up(self, measurement: Measurement) -> None:
        work, limit = measurement.work, measurement.arm.max_batch_size
        if limit is not None and work.batch_size > limit:
            measurement.fail(
                f"{NOT_APPLICABLE}: this arm decodes at most {limit} sequence(s) at a time"
            )
        length = min(WARM_UP_TOKENS, work.max_new_tokens)
        name = f"warming up {measurement.arm.name}"
        self._decode(measurement, replace(work.call(0), max_new_tokens=length), name)

    def _decode(
        self, measurement: Measurement, call: Call, name: str | None
    ) -> tuple[DecodedCall, float] | None:
        """Decode once, and return the output and its seconds; `None` after a failure."""
        if measurement.failure is not None:
            return None
        self.on_call(name or measurement.arm.name)
        start = self.clock()
        try:
            output = measurement.arm.decode(self.pair, call)
            synchronize(self.pair)
        except FAILURES as error:
            measurement.fail(f"{type(error).__name__}: {error}")
            return None
        seconds, wanted = self.clock() - start, call.max_new_tokens
        short = [len(row) for row in output.token_ids if len(row) != wanted]
        if short and not call.eos_ids:
            measurement.fail(
                f"gave {short[0]} tokens where {wanted} were asked for, so it cannot be compared"
            )
            return None
        return output, seconds


def measure(
    pair: Pair,
    arms: Sequence[Arm],
    prompts: TokenIds,
    settings: Settings,
    *,
    on_call: OnCall,
) -> list[Measurement]:
    """Measure every arm at every temperature and batch size.

    Each arm prepares itself once and is warmed up once in each cell, uncounted. Then, for every
    repeat, temperature, batch size and batch of prompts, all arms decode that batch in turn; the
    order rotates, so no arm always follows the same arm. `on_call` receives the number of calls,
    warm-ups among them, and the arm's name before every call.
    """
    cells: list[list[Measurement]] = []
    for temperature, size in product(settings.temperatures, settings.batch_sizes):
        work = Workload(
            prompts=prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=temperature,
            batch_size=size,
            truncation=settings.truncation,
            seed=settings.seed,
            repeats=settings.repeats,
        )
        cells.append([Measurement(arm=arm, work=work) for arm in arms])
    on_call(
        "starting",
        sum(len(cell) * (1 + cell[0].work.repeats * len(cell[0].work.batches)) for cell in cells),
    )
    runner = Runner(pair=pair, clock=CLOCKS[settings.clock], on_call=on_call)
    with runner.running(cells):
        start = time.perf_counter()
        for repeat in range(settings.repeats):
            # Repeats take equally long, so the next one would end after (repeat + 1) / repeat of
            # what has passed.
            needed = (time.perf_counter() - start) * (repeat + 1) / max(1, repeat)
            if repeat and settings.time_limit_s is not None and needed > settings.time_limit_s:
                break
            # A full collection would take longer than many a pass, in whichever arm it falls.
            settle_objects()
            for cell in cells:
                count = len(cell[0].work.batches)
                for call in range(repeat * count, (repeat + 1) * count):
                    runner.take_turns(cell, call)
    return list(chain.from_iterable(cells))


def in_turns(
    works: Mapping[str, Work], repeats: int, until: float = math.inf
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every work, without the warm-ups; the order rotates.

    Once a turn is counted, no other begins after `until`, by `time.perf_counter`.
    """
    names, turns = list(works), list[dict[str, float]]()
    for turn in range(_WARM_UPS + repeats):
        if turn > _WARM_UPS and time.perf_counter() > until:
            break
        names.append(names.pop(0))
        turns.append({name: works[name]() for name in names})
    return {name: tuple(turn[name] for turn in turns[_WARM_UPS:]) for name in works}
