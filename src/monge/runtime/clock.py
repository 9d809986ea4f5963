"""The clock of all times that the engine keeps and that controllers learn from."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from monge.core.verdict import StageTimes

Clock = Callable[[], float]
"""Seconds since some moment."""

_CLOCK: Final[ContextVar[Clock]] = ContextVar("monge_clock", default=time.perf_counter)


def now() -> float:
    """Seconds by the clock in force: wall seconds, unless a benchmark on a busy machine says otherwise."""
    return _CLOCK.get()()


@contextmanager
def measured_by(clock: Clock) -> Iterator[None]:
    """Take times by this clock in the present thread, until the block ends."""
    token = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(token)


_prepared: Final = list[None]()  # a list, since threads may append at once


def note_preparation() -> None:
    """Note that a forward was compiled or captured, so that controllers ignore the time of this round."""
    _prepared.append(None)


def num_preparations() -> int:
    """Return the number of forwards compiled or captured so far, in any thread."""
    return len(_prepared)


@dataclass(slots=True)
class StageTimer:
    """Seconds by stage."""

    stages: dict[str, float] = field(default_factory=dict[str, float])
    _last: float = field(default_factory=now)
    _num_preparations: int = field(default_factory=num_preparations)

    def lap(self, stage: str) -> None:
        """End a stage; a stage that ends several times counts in sum."""
        before, self._last = self._last, now()
        self.stages[stage] = self.stages.get(stage, 0.0) + self._last - before

    def times(self, forward_s: float) -> StageTimes:
        """Return the times of the stages that have ended."""
        return StageTimes(
            total_s=sum(self.stages.values()),
            forward_s=forward_s,
            is_warm_up=num_preparations() > self._num_preparations,
            **self.stages,
        )
