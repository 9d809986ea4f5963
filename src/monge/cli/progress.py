"""Progress on standard error: bars on a terminal, lines after 10, 20, 40, ... seconds elsewhere."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from itertools import count
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text
from tqdm import tqdm

from monge.bench.runner import OnCall
from monge.cli.console import notes, places
from monge.runtime.notices import watched_by

QUIET_S: Final = 10.0
"""Seconds before the first line if standard error is no terminal; each later wait doubles."""
_ROUNDING: Final = 1e-6
"""Of counts that are sums of parts."""


class Stage:
    """A part of a command's work; `Work.stage` makes it."""

    def __init__(self, work: Progress, task: Task) -> None:
        self._work, self.task = work, task

    def advance(self, count: float | int = 1) -> None:
        """Count what was done since the last call."""
        if not self.task.started:
            self._work.start_task(self.task.id)
        self._work.advance(self.task.id, count)

    def reach(self, done: float | int) -> None:
        """Set the count."""
        self.advance(done - self.task.completed)

    def rename(self, name: str) -> None:
        """Set the name."""
        self._work.update(self.task.id, description=name)

    def restart(self, name: str, total: float | int | None = None, done: int = 0) -> None:
        """Begin another part in place of this part; work that is done already has no duration."""
        self._work.reset(self.task.id, completed=done, description=name)
        self.task.total = total
        self._work.advance(self.task.id, 0)


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
    def render(self, task: Task) -> Text:
        return Text(figures(task), style="dim")


class Work(Progress):
    """The stages of a command's work, and their display."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(16),
            _Figures(Column(no_wrap=True)),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not console.is_terminal,
            get_time=clock,
            speed_estimate_period=math.inf,  # one step a minute has a speed too
        )
        self._begun, self._next_s, self._ended = clock(), QUIET_S, threading.Event()

    def start(self) -> None:
        """Start the bars, or the lines."""
        super().start()
        if self.disable:
            threading.Thread(target=self._tell, daemon=True).start()

    def stop(self) -> None:
        """Stop them."""
        self._ended.set()
        super().stop()

    def stage(
        self,
        name: str,
        total: float | int | None = None,
        *,
        expected_s: float | int | None = None,
        is_begun: bool = True,
    ) -> Stage:
        """Show another stage.

        Args:
            name: Its name.
            total: Total of its count; `None` where it is unknown.
            expected_s: Expected seconds, of a stage that counts nothing.
            is_begun: It begins now; otherwise when it first advances, and that first count has no
                duration.
        """
        task_id = self.add_task(name, start=is_begun, total=total, expected_s=expected_s)
        if is_begun:
            self.advance(task_id, 0)  # the rate counts from here
        return Stage(self, next(task for task in self.tasks if task.id == task_id))

    @contextmanager
    def waiting(self, name: str, expected_s: float | int | None = None) -> Iterator[Stage]:
        """Show a stage until the block ends; `expected_s` is the expected duration."""
        stage = self.stage(name, expected_s=expected_s)
        try:
            yield stage
        finally:
            self.remove_task(stage.task.id)

    def tick(self) -> None:
        """Print a line about the last running stage, if due; say only once that it is late."""
        running = [task for task in self.tasks if task.started and not task.finished]
        elapsed_s = self.get_time() - self._begun
        if not running or elapsed_s < self._next_s:
            return
        while 0 < self._next_s <= elapsed_s:
            self._next_s *= 2
        task = running[-1]
        text = f"{task.description}: {figures(task)}"
        self.console.print(text, markup=False, soft_wrap=True)
        if (task.elapsed or 0.0) >= (task.fields["expected_s"] or math.inf):
            task.fields["expected_s"] = None

    def _tell(self) -> None:
        while not self._ended.wait(1.0):
            self.tick()


_active: list[Work] = []


@contextmanager
def working(name: str | None = None) -> Iterator[Work]:
    """Show progress in this block, or in that around it; `name` is a first stage without a total."""
    with ExitStack() as stack:
        if not _active:
            stack.enter_context(_without_bars_of_the_host())
            work = stack.enter_context(Work(notes()))
            stack.enter_context(watched_by(work.waiting))
            _active.append(work)
            stack.callback(_active.clear)
            if not work.disable:
                places.append(show := lambda: work.console)
                stack.callback(places.remove, show)
        if name is not None:
            stack.enter_context(_active[-1].waiting(name))
        yield _active[-1]


@contextmanager
def _without_bars_of_the_host() -> Iterator[None]:
    """Turn off bars of tqdm, which would show the same work."""
    bar: Any = tqdm
    before = bar.__init__
    bar.__init__ = partialmethod(before, disable=True)
    try:
        yield
    finally:
        bar.__init__ = before


@contextmanager
def call_bar() -> Iterator[OnCall]:
    """Show the calls of a benchmark, each named before it begins; the first that gives a total is not counted."""
    with working() as work, work.waiting("starting") as stage:
        begun = count()

        def on_call(name: str, total: int | None = None) -> None:
            if total is not None:
                stage.restart(name, total)
                return
            stage.rename(name)
            if stage.task.total is not None:
                stage.reach(next(begun))

        yield on_call


def duration(seconds: float | int) -> str:
    """Return seconds in two units at most: `40 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    unit, large, small = (60, "min", "s") if whole < 3600 else (3600, "h", "min")
    rest = whole % 60 if whole < 3600 else whole % 3600 // 60
    return f"{whole // unit} {large}" + (f" {rest} {small}" if rest else "")
