"""Progress on standard error, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from monge.bench.decode import Watch
from monge.cli.console import notes


@contextmanager
def call_bar() -> Iterator[Watch]:
    """A progress bar of calls."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with _progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=None)
        started = False

        def total(count: int) -> None:
            nonlocal started
            started = True
            progress.reset(task, total=count)

        yield Watch(total=total, step=lambda name: progress.update(task, description=name, advance=int(started)))


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """A line that says what is being done."""
    with _progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("")
        yield lambda name: progress.update(task, description=name)


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars that stay, of a name and a total each; what makes one returns what advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with _progress(*columns) as progress:

        def bar(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total, start=False)

            def advance(count: int) -> None:
                progress.start_task(task)
                progress.advance(task, count)

            return advance

        yield bar


def _progress(*columns: object, transient: bool = False) -> Progress:
    console = notes()
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)  # pyright: ignore
