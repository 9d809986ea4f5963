"""Speed of the defaults over that of plain decoding, cell by cell, with an interval over prompts.

A cell is a class of prompts, a way of calling the library, a temperature and a batch size. Both arms of a cell
decode each batch one after the other, in rotating order, so a slow minute of the machine slows both.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np

import monge
from monge.bench.arms import (
    DEFAULT,
    PLAIN,
    Arm,
    Call,
    DecodedCall,
    HostArm,
    MongeArm,
    TokenIds,
    plain_arm,
    synchronize,
)
from monge.bench.pair import Pair
from monge.bench.resamples import Estimate, Resamples
from monge.bench.runner import CLOCKS, Measurement, OnCall, Settings, measure
from monge.core.draws import SeededDraws

DROP_IN: Final = "drop-in"
GOAL: Final = 0.97
"""Least lower end of an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The defaults beside plain decoding.

    Args:
        task: Class of the prompts.
        way: `monge` beside its own plain decoding, or `drop-in`: `model.generate` of `transformers`
            after `monge.accelerate`, beside itself before.
        temperature: 0 is greedy.
        truncation: Top-k, top-p and min-p, where they are set.
        batch_size: Rows of a call.
        ratio: Speed over that of plain decoding.
        low: Lower end of its 95 % interval; `None` of a single prompt or batch.
        high: Upper end.
        tokens_per_s: Tokens per second of the defaults.
        plain_tokens_per_s: Tokens per second of plain decoding.
        num_calls: Measured calls of each arm.
        failure: Why there are no numbers.
    """

    task: str
    way: str
    temperature: float
    batch_size: int
    truncation: Mapping[str, Any] = field(default_factory=dict)
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    num_calls: int = 0
    failure: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class TimedArm(Arm):
    """Another arm, and the seconds of each of its calls.

    Args:
        arm: The arm.
        clock: Measures seconds.
    """

    arm: Arm
    clock: Callable[[], float]
    seconds: dict[tuple[float, int], list[float]] = field(init=False, default_factory=dict)
    """By temperature and batch size; the first call of each is its warm-up."""

    def prepare(self, pair: Pair) -> None:
        self.arm.prepare(pair)

    def decode(self, pair: Pair, call: Call) -> DecodedCall:
        began = self.clock()
        output = self.arm.decode(pair, call)
        synchronize(pair)
        place = (call.temperature, len(call.prompt_ids))
        self.seconds.setdefault(place, []).append(self.clock() - began)
        return output


@dataclass(slots=True, kw_only=True, eq=False)
class DropInArm(Arm):
    """`model.generate` after `monge.accelerate`, with the pair's draft model or head and its backend."""

    model: Any = field(init=False, default=None)

    def prepare(self, pair: Pair) -> None:
        draft: Any = pair.draft
        if pair.head is not None:
            from monge.draft.by_name import read_head

            draft = read_head(str(pair.names["draft"]), str(pair.names["target"]))
        # Beside the same network whose `generate` stays; programs were compiled with the pair.
        self.model = monge.accelerate(copy.copy(pair.target), draft, backend=pair.backend)

    def decode(self, pair: Pair, call: Call) -> DecodedCall:
        return HostArm(name=PLAIN, family="plain").decode(replace(pair, target=self.model), call)


def arms_of(way: str) -> tuple[Arm, Arm]:
    """The defaults and plain decoding, called in one way."""
    if way == DROP_IN:
        return DropInArm(name=DROP_IN), HostArm(name=PLAIN, family="plain")
    return MongeArm(name=DEFAULT), plain_arm()


def measured_cells(
    pair: Pair,
    task: str,
    way: str,
    prompts: TokenIds,
    settings: Settings,
    *,
    on_call: OnCall,
) -> list[Cell]:
    """Measure both arms of a way over the prompts of a class, at every temperature and batch size.

    Controllers learn from the first call on, and keep what they have learnt within the class. Intervals
    resample prompts, and where a call decodes several of them, calls.
    """
    clock = CLOCKS[settings.clock]
    ours, plain = (TimedArm(name=one.name, arm=one, clock=clock) for one in arms_of(way))
    found = measure(pair, (ours, plain), prompts, settings, on_call=on_call)
    places = product(settings.temperatures, settings.batch_sizes)
    cells: list[Cell] = []
    for temperature, size in places:
        rules = {"temperature": temperature, "truncation": settings.truncation}
        cell = Cell(task=task, way=way, batch_size=size, **rules)
        failure = _failure(found, temperature, size)
        if failure is not None:
            cells.append(replace(cell, failure=failure))
            continue
        seconds, others = (one.seconds[temperature, size][1:] for one in (ours, plain))
        interval = ratio_interval(seconds, others, len(prompts) if size == 1 else len(seconds))
        num_tokens = len(seconds) * size * settings.max_new_tokens
        cells.append(
            replace(
                cell,
                ratio=math.fsum(others) / math.fsum(seconds),
                low=None if interval is None else interval.low,
                high=None if interval is None else interval.high,
                tokens_per_s=num_tokens / math.fsum(seconds),
                plain_tokens_per_s=num_tokens / math.fsum(others),
                num_calls=len(seconds),
            )
        )
    return cells


def ratio_interval(
    seconds: Sequence[float], others: Sequence[float], num_clusters: int
) -> Estimate | None:
    """Speed over that of others which did the same work, with a bootstrap interval.

    Args:
        seconds: Of every call.
        others: Of the same calls of the others.
        num_clusters: After so many calls the first prompt comes again; prompts are resampled.

    Returns:
        The ratio of sums; `None` of a single prompt.
    """
    if num_clusters < 2:
        return None
    clusters = np.arange(len(seconds)) % num_clusters
    resamples = Resamples.draw(num_clusters, SeededDraws(0))
    return resamples.ratio(np.array(others), np.array(seconds), clusters)


def _failure(found: Sequence[Measurement], temperature: float, size: int) -> str | None:
    for one in found:
        if (one.temperature, one.batch_size) == (temperature, size) and one.failure is not None:
            return f"{one.arm.name}: {one.failure}"
    return None
