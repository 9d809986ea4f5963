"""Measure arms side by side: interleaved, repeated, in rotating order, with failures that stay failures."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from monge.bench.arms import Arm, Call, Output, TokenIds, synchronize
from monge.bench.pair import Pair
from monge.core.draws import check_seed
from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import StepRecord
from monge.engine.clock import measured_by
from monge.engine.process import settle_objects

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
class Settings:
    """Settings of a comparison.

    Args:
        max_new_tokens: Length of every completion.
        repeats: Measured passes over the prompts; the warm-up comes on top.
        temperatures: 0 is greedy.
        batch_sizes: Rows decoded together.
        seed: Every repeat and batch derives its own from it, the same for all arms.
        time_limit_s: No repeat is started that would end later than so many seconds after the
            first; the first always ends.
        clock: The clock, one of `CLOCKS`; controllers measure by it too.
    """

    max_new_tokens: int = 64
    repeats: int = 3
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    seed: int = 0
    time_limit_s: float | None = None
    clock: str = "wall"

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise unknown_name("clock", self.clock, CLOCKS)
        for temperature in self.temperatures:
            SamplingRules(temperature=temperature)
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


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One arm at one temperature and batch size.

    Args:
        arm: The arm.
        temperature: 0 is greedy.
        batch_size: Rows decoded together.
        seconds: Seconds of every repeat, by the clock of the settings.
        num_tokens: New tokens of every repeat.
        records: Round records of the measured repeats.
        completions: New tokens of every row of every repeat, in the same order for all arms.
        failure: Why there are no numbers.
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
        """Record why there are no numbers, and forget those there were."""
        self.failure = reason
        for numbers in (self.seconds, self.num_tokens, self.records, self.completions):
            numbers.clear()


def batches(prompts: TokenIds, size: int) -> list[TokenIds]:
    """Return full batches that hold every prompt; the last one is filled up from the first prompts."""
    count = -(-len(prompts) // size)
    return [
        tuple(prompts[(batch * size + row) % len(prompts)] for row in range(size))
        for batch in range(count)
    ]


def num_calls(arms: Sequence[Arm], prompts: TokenIds, settings: Settings) -> int:
    """Return the number of calls of `measure` if no arm fails."""
    sizes = settings.batch_sizes
    per_arm = sum(settings.repeats * len(batches(prompts, size)) + 1 for size in sizes)
    return len(arms) * len(settings.temperatures) * per_arm


def measure(
    pair: Pair,
    arms: Sequence[Arm],
    prompts: TokenIds,
    settings: Settings,
    *,
    on_call: Callable[[str], None],
) -> list[Measurement]:
    """Measure every arm at every temperature and batch size.

    Each arm prepares itself once and is warmed up once in each cell, uncounted. Then, for every
    repeat, temperature, batch size and batch of prompts, all arms decode that batch one after
    another; the order rotates, so no arm always follows the same one. `on_call` is told the arm's name
    before every call.
    """
    cells = {
        (temperature, size): [
            Measurement(arm=arm, temperature=temperature, batch_size=size) for arm in arms
        ]
        for temperature in settings.temperatures
        for size in settings.batch_sizes
    }
    found = [measurement for cell in cells.values() for measurement in cell]
    with measured_by(CLOCKS[settings.clock]):
        try:
            for arm in arms:
                _prepare([one for one in found if one.arm is arm], pair)
            for one in found:
                _warm_up(one, pair, prompts, settings, on_call)
            _measure(cells, pair, prompts, settings, on_call)
        finally:
            gc.unfreeze()
    return found


def _prepare(measurements: Sequence[Measurement], pair: Pair) -> None:
    try:
        measurements[0].arm.prepare(pair)
    except FAILURES as error:
        for measurement in measurements:
            measurement.fail(f"{type(error).__name__}: {error}")


def _warm_up(
    one: Measurement,
    pair: Pair,
    prompts: TokenIds,
    settings: Settings,
    on_call: Callable[[str], None],
) -> None:
    limit = one.arm.max_batch_size
    if one.failure is None and limit is not None and one.batch_size > limit:
        one.fail(f"{NOT_APPLICABLE}: this arm decodes at most {limit} sequence(s) at a time")
    call = Call(
        prompt_ids=batches(prompts, one.batch_size)[0],
        max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens),
        temperature=one.temperature,
        seed=settings.seed,
    )
    _decode(one, pair, call, CLOCKS[settings.clock], on_call)


def _measure(
    cells: Mapping[tuple[float, int], Sequence[Measurement]],
    pair: Pair,
    prompts: TokenIds,
    settings: Settings,
    on_call: Callable[[str], None],
) -> None:
    start = time.perf_counter()
    for repeat in range(settings.repeats):
        # Repeats take equally long, so the next one would end after (repeat + 1) / repeat of what
        # has passed.
        needed = (time.perf_counter() - start) * (repeat + 1) / max(1, repeat)
        if repeat and settings.time_limit_s is not None and needed > settings.time_limit_s:
            break
        # A full collection would take longer than many a pass, in whichever arm it falls.
        settle_objects()
        for (temperature, size), cell in cells.items():
            for measurement in cell:
                if measurement.failure is None:
                    measurement.seconds.append(0.0)
                    measurement.num_tokens.append(0)
            for number, batch in enumerate(batches(prompts, size)):
                call = Call(
                    prompt_ids=batch,
                    max_new_tokens=settings.max_new_tokens,
                    temperature=temperature,
                    seed=settings.seed + 100_003 * repeat + number,
                )
                first = (repeat + number) % len(cell)  # no arm always follows the same one
                for measurement in [*cell[first:], *cell[:first]]:
                    made = _decode(measurement, pair, call, CLOCKS[settings.clock], on_call)
                    if made is None:
                        continue
                    output, seconds = made
                    measurement.seconds[-1] += seconds
                    measurement.num_tokens[-1] += sum(map(len, output.token_ids))
                    measurement.records += output.records
                    measurement.completions += output.token_ids


def _decode(
    measurement: Measurement,
    pair: Pair,
    call: Call,
    clock: Callable[[], float],
    on_call: Callable[[str], None],
) -> tuple[Output, float] | None:
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
