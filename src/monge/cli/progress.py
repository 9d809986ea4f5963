"""Progress on standard error: bars on a terminal, a line every ten seconds elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text
from tqdm import tqdm

from monge.bench.decode import ProgressCallbacks
from monge.cli.console import notes, redrawing
from monge.engine.notices import watched_by

QUIET_S: Final = 10.0
"""Seconds between two lines where standard error is no terminal."""
_BAR_WIDTH: Final = 16
_ROUNDING: Final = 1e-6
"""Of counts that are sums of parts."""


class Stage:
    """A part of a command's work: a task of `rich` that shows its figures.

    Args:
        bars: What shows it.
        name: What is being done.
        total: Of what is counted; `None` where it is unknown.
        expected_s: Expected seconds, of a part that counts nothing.
        is_begun: It begins now; otherwise when it first advances, and that first count has no
            duration.
    """

    def __init__(
        self,
        bars: Progress,
        name: str,
        total: float | int | None = None,
        *,
        expected_s: float | int | None = None,
        is_begun: bool = True,
    ) -> None:
        task_id = bars.add_task(name, start=is_begun, total=total, expected_s=expected_s)
        self._bars, self.task = bars, next(one for one in bars.tasks if one.id == task_id)
        if is_begun:
            bars.advance(task_id, 0)  # the rate counts from here

    def advance(self, count: float | int = 1) -> None:
        """Count what was done since the last call."""
        if not self.task.started:
            self._bars.start_task(self.task.id)
        self._bars.advance(self.task.id, count)

    def reach(self, done: float | int) -> None:
        """Set what is done."""
        self.advance(done - self.task.completed)

    def rename(self, name: str) -> None:
        """Say what is being done now."""
        self._bars.update(self.task.id, description=name)

    def restart(self, name: str, total: float | int | None = None, done: int = 0) -> None:
        """Begin another part in the place of this one; what is done before it has no duration."""
        self._bars.reset(self.task.id, completed=done, description=name)
        self.task.total = total
        self._bars.advance(self.task.id, 0)


def figures(task: Task) -> str:
    """Return how far a task is, how long it took, and how long it still takes."""
    parts: list[str] = []
    expected_s, elapsed_s = task.fields["expected_s"], task.elapsed or 0.0
    if task.completed or task.total is not None:
        of = "" if task.total is None else f" of {task.total:g}"
        parts.append(f"{math.floor(task.completed + _ROUNDING)}{of}")
    parts.append(f"{duration(elapsed_s)} so far")
    left = task.time_remaining if expected_s is None else expected_s - elapsed_s
    if left is not None and left > 0:
        parts.append(f"about {duration(left)} left")
    elif expected_s is not None:
        parts.append(f"{duration(expected_s)} were expected")
    return ", ".join(parts)


class _Figures(ProgressColumn):
    """Shows the figures of a task."""

    def render(self, task: Task) -> Text:
        return Text(figures(task), style="dim")


class Work:
    """What a command does: its stages, and where they are shown.

    Args:
        console: Where to.
        clock: Tells seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._said_at = console, clock, clock()
        self.bars = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(_BAR_WIDTH),
            _Figures(Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            get_time=clock,
            speed_estimate_period=math.inf,  # one step a minute has a speed too
        )
        self._ended = threading.Event()

    def __enter__(self) -> "Work":
        self.bars.start()
        if self.bars.disable:
            threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.bars.stop()

    def stage(self, name: str, total: float | int | None = None, **options: Any) -> Stage:
        """Show another stage; arguments as for `Stage`."""
        return Stage(self.bars, name, total, **options)

    def end(self, stage: Stage) -> None:
        """Show a stage no more."""
        self.bars.remove_task(stage.task.id)

    @contextmanager
    def waiting(self, name: str, expected_s: float | int | None = None) -> Iterator[None]:
        """Show a stage until the block ends; `expected_s` is the expected duration."""
        stage = self.stage(name, expected_s=expected_s)
        try:
            yield
        finally:
            self.end(stage)

    def tick(self) -> None:
        """Print a line about the last stage that runs, if none was printed for a while."""
        running = [task for task in self.bars.tasks if task.started and not task.finished]
        if running and self._clock() - self._said_at >= QUIET_S:
            self._said_at = self._clock()
            text = f"{running[-1].description}: {figures(running[-1])}"
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
def call_bar(name: str = "starting") -> Iterator[ProgressCallbacks]:
    """A bar of calls.

    `ProgressCallbacks.total` begins a row of calls, and `ProgressCallbacks.step` says before each what it does.
    """
    with working() as work:
        stage, begun = work.stage(name), -1

        def total(count: int) -> None:
            nonlocal begun
            begun = 0
            stage.restart(stage.task.description, count)

        def step(name: str) -> None:
            nonlocal begun
            stage.rename(name)
            if begun >= 0:
                stage.reach(min(begun, stage.task.total or begun))
                begun += 1

        yield ProgressCallbacks(total=total, step=step)
        work.end(stage)


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Yield what says on a line what is being done."""
    with working() as work:
        stage = work.stage("starting")
        yield stage.restart
        work.end(stage)


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[float], None]]]:
    """Yield what makes a bar of a name and a total, and returns what advances it."""
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
