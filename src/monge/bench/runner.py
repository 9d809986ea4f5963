"""Measure arms side by side: interleaved, repeated, in rotating order, with failures that stay failures."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, Final

from monge.bench.arms import Arm, Call, DecodedCall, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.core.draws import check_seed
from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.engine.clock import measured_by
from monge.engine.process import settle_objects
from monge.options import MEASURING, LengthAndTruncation, changed, option

OnCall = Callable[..., None]
"""Callback `on_call(name)` before each call of a benchmark; `on_call(name, total)` announces their number."""

FAILURES: Final = (MongeError, RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Errors of hosts and arms that cannot decode; any other error is a fault of the benchmark and ends it."""

WARM_UP_TOKENS: Final = 16
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


@dataclass(slots=True, kw_only=True)
class Measurement:
    """An arm at a temperature and batch size: seconds and new tokens of every repeat.

    Completions are the tokens of every row of every repeat, in the same order for all arms. A
    failure is the reason why there are no numbers.
    """

    arm: Arm
    temperature: float
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    completions: list[tuple[int, ...]] = field(default_factory=list)
    failure: str | None = None

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """Tokens per second of every repeat: all tokens / all seconds of its calls."""
        return tuple(
            tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)
        )

    def fail(self, reason: str) -> None:
        """Record why there are no numbers, and drop earlier numbers."""
        self.failure = reason
        for numbers in (self.seconds, self.num_tokens, self.records, self.completions):
            numbers.clear()


def batches(prompts: TokenIds, size: int) -> list[TokenIds]:
    """Return full batches of all prompts; the last batch is filled up with the first prompts."""
    count = -(-len(prompts) // size)
    return [
        tuple(prompts[(batch * size + row) % len(prompts)] for row in range(size))
        for batch in range(count)
    ]


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
    and the arm's name before every call.
    """
    places = list(product(settings.temperatures, settings.batch_sizes))
    cells = [
        [Measurement(arm=arm, temperature=temperature, batch_size=size) for arm in arms]
        for temperature, size in places
    ]
    measurements = list(chain.from_iterable(cells))
    warm_ups = [
        (measurement, _warm_up(measurement, prompts, settings)) for measurement in measurements
    ]
    repeats = [
        list(chain.from_iterable(_turns(cell, prompts, settings, repeat) for cell in cells))
        for repeat in range(settings.repeats)
    ]
    on_call("starting", len(warm_ups) + sum(map(len, repeats)))
    with measured_by(CLOCKS[settings.clock]):
        try:
            for arm in arms:
                try:
                    arm.prepare(pair)
                except FAILURES as error:
                    for measurement in measurements:
                        if measurement.arm is arm:
                            measurement.fail(f"{type(error).__name__}: {error}")
            for measurement, call in warm_ups:
                _decode(measurement, pair, call, CLOCKS[settings.clock], on_call)
            _measure(repeats, pair, settings, on_call)
        finally:
            gc.unfreeze()
    return measurements


def _warm_up(measurement: Measurement, prompts: TokenIds, settings: Settings) -> Call:
    limit = measurement.arm.max_batch_size
    if limit is not None and measurement.batch_size > limit:
        measurement.fail(
            f"{NOT_APPLICABLE}: this arm decodes at most {limit} sequence(s) at a time"
        )
    return Call(
        prompt_ids=batches(prompts, measurement.batch_size)[0],
        max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens),
        temperature=measurement.temperature,
        truncation=settings.truncation,
        seed=settings.seed,
    )


def _turns(
    cell: Sequence[Measurement], prompts: TokenIds, settings: Settings, repeat: int
) -> Iterator[tuple[Measurement, Call]]:
    for number, batch in enumerate(batches(prompts, cell[0].batch_size)):
        call = Call(
            prompt_ids=batch,
            max_new_tokens=settings.max_new_tokens,
            temperature=cell[0].temperature,
            truncation=settings.truncation,
            seed=settings.seed + 100_003 * repeat + number,
        )
        first = (repeat + number) % len(cell)  # no arm always follows the same one
        for measurement in (*cell[first:], *cell[:first]):
            yield measurement, call


def _measure(
    repeats: Sequence[Sequence[tuple[Measurement, Call]]],
    pair: Pair,
    settings: Settings,
    on_call: OnCall,
) -> None:
    start = time.perf_counter()
    for repeat, turns in enumerate(repeats):
        # Repeats take equally long, so the next one would end after (repeat + 1) / repeat of what
        # has passed.
        needed = (time.perf_counter() - start) * (repeat + 1) / max(1, repeat)
        if repeat and settings.time_limit_s is not None and needed > settings.time_limit_s:
            break
        # A full collection would take longer than many a pass, in whichever arm it falls.
        settle_objects()
        for measurement, call in turns:
            decoded = _decode(measurement, pair, call, CLOCKS[settings.clock], on_call)
            if decoded is None:
                continue
            output, seconds = decoded
            if len(measurement.seconds) == repeat:
                measurement.seconds.append(0.0)
                measurement.num_tokens.append(0)
            measurement.seconds[-1] += seconds
            measurement.num_tokens[-1] += sum(map(len, output.token_ids))
            measurement.records += output.records
            measurement.completions += output.token_ids


def _decode(
    measurement: Measurement,
    pair: Pair,
    call: Call,
    clock: Callable[[], float],
    on_call: OnCall,
) -> tuple[DecodedCall, float] | None:
    """Decode once, and return the output and its seconds; `None` after a failure."""
    if measurement.failure is not None:
        return None
    on_call(measurement.arm.name)
    start = clock()
    try:
        output = measurement.arm.decode(pair, call)
        synchronize(pair)
    except FAILURES as error:
        measurement.fail(f"{type(error).__name__}: {error}")
        return None
    seconds, wanted = clock() - start, call.max_new_tokens
    short = [len(row) for row in output.token_ids if len(row) != wanted]
    if not short:
        return output, seconds
    measurement.fail(
        f"gave {short[0]} tokens where {wanted} were asked for, so it cannot be compared"
    )
    return None
