"""Progress on standard error: bars on a terminal, a line every ten seconds elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text
from tqdm import tqdm

from monge.bench.decode import Watch
from monge.cli.console import notes, redrawing
from monge.engine.notices import watched_by

QUIET_S: Final = 10.0
"""Seconds between two lines where standard error is no terminal."""
BAR_WIDTH: Final = 16
_ROUNDING: Final = 1e-6
"""Of counts that are sums of parts."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """A part of a command's work.

    Args:
        name: What is being done.
        clock: Tells seconds.
        total: Of what is counted; `None` where it is unknown.
        is_time: Whether expected seconds are counted, which pass by themselves.
        began: When it began; `None` if it begins when it first advances.
    """

    name: str
    clock: Callable[[], float]
    total: float | int | None = None
    is_time: bool = False
    began: float | int | None = None
    _done: float | int = 0
    _before: float | int = 0

    def advance(self, count: float | int = 1) -> None:
        """Count what was done since the last call."""
        if self.began is None:
            # The first count has no duration: it is left out of the rate.
            self.began, self._before = self.clock(), self._done + count
        self._done += count

    def reach(self, done: float | int, total: float | int | None = None) -> None:
        """Set what is done, and perhaps a new total."""
        self.total = self.total if total is None else total
        self.advance(done - self._done)

    def restart(self, name: str, total: float | int | None = None, done: float | int = 0) -> None:
        """Begin another part in the place of this one; what is done before it has no duration."""
        self.name, self.total, self.began = name, total, self.clock()
        self._done = self._before = done

    @property
    def elapsed_s(self) -> float | int:
        """Seconds since it began."""
        return 0.0 if self.began is None else self.clock() - self.began

    @property
    def done(self) -> float | int:
        """What is done of the total."""
        if not self.is_time or self.total is None:
            return self._done
        return min(self.elapsed_s, self.total)

    @property
    def is_complete(self) -> bool:
        """Whether all of a known total is done."""
        return self.total is not None and self.done >= self.total and not self.is_time

    @property
    def remaining_s(self) -> float | int | None:
        """Seconds left, at the mean rate so far; `None` if that is unknown."""
        if self.total is None:
            return None
        if self.is_time:
            return self.total - self.elapsed_s if self.elapsed_s < self.total else None
        counted = self._done - self._before
        if counted <= 0:
            return None
        return max(0.0, self.total - self._done) * self.elapsed_s / counted

    @property
    def figures(self) -> str:
        """How far it is, how long it took, and how long it still takes."""
        parts: list[str] = []
        if not self.is_time and (self._done or self.total is not None):
            of = "" if self.total is None else f" of {self.total:g}"
            whole = math.floor(self._done + _ROUNDING)
            parts.append(f"{whole}{of}")
        parts.append(f"{duration(self.elapsed_s)} so far")
        if (left := self.remaining_s) is not None and not self.is_complete:
            parts.append(f"about {duration(left)} left")
        elif self.is_time and self.total is not None:
            parts.append(f"{duration(self.total)} were expected")
        return ", ".join(parts)


class Work:
    """What a command does: its stages, and where they are shown.

    Args:
        console: Where to.
        clock: Tells seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._stages: list[tuple[Stage, TaskID]] = []
        self._said_at = clock()
        self._bars = Progress(
            _Spinner(),
            _Column(lambda stage: Text(stage.name)),
            _Column(_bar),
            _Column(lambda stage: Text(stage.figures, style="dim")),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._ended = threading.Event()

    def __enter__(self) -> "Work":
        self._bars.start()
        if self._bars.disable:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._bars.stop()

    def stage(
        self,
        name: str,
        total: float | int | None = None,
        *,
        is_time: bool = False,
        is_begun: bool = True,
    ) -> Stage:
        """Show another stage, from now or from when it first advances."""
        stage = Stage(
            name=name,
            clock=self._clock,
            total=total,
            is_time=is_time,
            began=self._clock() if is_begun else None,
        )
        self._stages.append((stage, self._bars.add_task(name, total=None, stage=stage)))
        return stage

    def end(self, stage: Stage) -> None:
        """Show a stage no more."""
        for one in self._stages:
            if one[0] is stage:
                self._stages.remove(one)
                self._bars.remove_task(one[1])
                return

    @contextmanager
    def waiting(self, name: str, expected_s: float | int | None = None) -> Iterator[None]:
        """Show a stage until the block ends; `expected_s` is the expected duration."""
        stage = self.stage(name, expected_s, is_time=True)
        try:
            yield
        finally:
            self.end(stage)

    def tick(self) -> None:
        """Print a line about the last stage that runs, if none was printed for a while."""
        running = [one for one, _ in self._stages if one.began is not None and not one.is_complete]
        if running and self._clock() - self._said_at >= QUIET_S:
            self._said_at = self._clock()
            text = f"{running[-1].name}: {running[-1].figures}"
            self._console.print(text, markup=False, soft_wrap=True)

    def _tell(self) -> None:
        while not self._ended.wait(1.0):
            self.tick()


_active: list[Work] = []


@contextmanager
def working(name: str | None = None) -> Iterator[Work]:
    """Show progress in this block; within another such block, show it there.

    Args:
        name: A first stage without a total; it ends with the block.
    """
    if _active:
        with _first_stage(_active[-1], name):
            yield _active[-1]
        return
    console = notes()
    with (
        _without_bars_of_the_host(),
        redrawing(console),
        Work(console) as work,
        watched_by(work.waiting),
        _first_stage(work, name),
    ):
        _active.append(work)
        try:
            yield work
        finally:
            _active.pop()


@contextmanager
def _without_bars_of_the_host() -> Iterator[None]:
    """Keep the bars that the host draws with tqdm off the terminal, where ours show the same work."""
    bar: Any = tqdm
    before = bar.__init__
    bar.__init__ = partialmethod(before, disable=True)
    try:
        yield
    finally:
        bar.__init__ = before


@contextmanager
def _first_stage(work: Work, name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    with work.waiting(name):
        yield


@contextmanager
def call_bar(name: str = "starting") -> Iterator[Watch]:
    """A bar of calls.

    `Watch.total` begins a row of calls, and `Watch.step` says before each what it does.
    """
    with working() as work:
        stage, is_counted = work.stage(name), False
        calls = 0

        def total(count: int) -> None:
            nonlocal calls, is_counted
            calls, is_counted = 0, True
            stage.restart(stage.name, count)

        def step(name: str) -> None:
            nonlocal calls
            stage.name = name
            if is_counted:
                stage.reach(min(calls, stage.total or calls))
                calls += 1

        yield Watch(total=total, step=step)
        work.end(stage)


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """A line that says what is being done."""
    with working() as work:
        stage = work.stage("starting")
        yield stage.restart
        work.end(stage)


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[float], None]]]:
    """Bars of a name and a total each; what makes one returns what advances it."""
    with working() as work:
        yield lambda name, total: work.stage(name, total, is_begun=False).advance


def duration(seconds: float | int) -> str:
    """Seconds in two units at most: `40 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


class _Column(ProgressColumn):
    """A column that shows something of a stage."""

    def __init__(self, shown: Callable[[Stage], Text | ProgressBar]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._shown = shown

    def render(self, task: Task) -> Text | ProgressBar:
        return self._shown(task.fields["stage"])


class _Spinner(SpinnerColumn):
    """Turns while the stage runs."""

    def render(self, task: Task) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        stage: Stage = task.fields["stage"]
        if stage.began is None or stage.is_complete:
            return Text(" ")
        return super().render(task)  # pyright: ignore[reportReturnType]


def _bar(stage: Stage) -> ProgressBar:
    return ProgressBar(
        total=stage.total,
        completed=stage.done,
        width=BAR_WIDTH,
        pulse=stage.total is None and stage.began is not None,
    )
