"""Speed of the defaults over that of plain decoding, cell by cell, with an interval over prompts.

A cell is a class of prompts, a way of calling the library, a temperature and a batch size. Both arms of a cell
decode each batch one after the other, in rotating order, so a slow minute of the machine slows both.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import monge
from monge.bench.arms import (
    DEFAULT,
    NO_DRAFTS,
    PLAIN,
    Arm,
    Call,
    DecodedCall,
    HostArm,
    TokenIds,
    named_arm,
)
from monge.bench.pair import Pair
from monge.bench.runner import OnCall, Settings, measure

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
    return named_arm(f"{DEFAULT}:"), named_arm(NO_DRAFTS)


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
    found = measure(pair, arms_of(way), prompts, settings, on_call=on_call)
    cells: list[Cell] = []
    for ours, plain in zip(found[::2], found[1::2], strict=True):
        truncation = ours.work.truncation
        cell = Cell(task=task, way=way, truncation=truncation, **ours.place)
        failed = [one for one in (ours, plain) if one.failure is not None]
        if failed:
            cells.append(replace(cell, failure=f"{failed[0].arm.name}: {failed[0].failure}"))
            continue
        num_calls, size = len(ours.seconds), ours.work.batch_size
        num_clusters = len(prompts) if size == 1 else num_calls
        interval = ours.speedup(plain, num_clusters)
        has_spread = num_clusters > 1
        cells.append(
            replace(
                cell,
                ratio=interval.mean,
                low=interval.low if has_spread else None,
                high=interval.high if has_spread else None,
                tokens_per_s=ours.speed,
                plain_tokens_per_s=plain.speed,
                num_calls=num_calls,
            )
        )
    return cells
