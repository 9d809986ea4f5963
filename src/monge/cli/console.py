"""What all commands share: where they write, how they fail, and a quiet host."""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from monge.core.errors import MongeError


def output(width: int | None = None) -> Console:
    """Standard output, for what was asked for; `width` is that of tables where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else width)


def plain_table(title: str, first: str, columns: Sequence[str] = (), justify: Literal["left", "right"] = "right") -> Table:
    """A table without edges: the first column names rows, the others are numbers unless justified otherwise."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", show_edge=False, pad_edge=False)
    table.add_column(first, style="bold cyan", overflow="fold")
    for column in columns:
        table.add_column(column, justify=justify, no_wrap=justify == "right")
    return table


def notes() -> Console:
    """Standard error, for progress, notes and errors: what is piped stays clean."""
    return Console(file=sys.stderr, highlight=False)


def say_error(message: object) -> None:
    """One red line on standard error."""
    console = notes()
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(str(message).split()), markup=False, style="red", soft_wrap=True)


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose expected failures end in one line and a status: 2 for an error of the user's, 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except MongeError as error:
            say_error(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            notes().print("\ninterrupted")
            raise typer.Exit(130) from error

    return run


def quiet_host() -> None:
    """Keep the host's bars and advice off the terminal: they speak of calls users never made. Let our own notes through."""
    from transformers.utils import logging as host_logging

    host_logging.disable_progress_bar()
    host_logging.set_verbosity_error()
    ours = logging.getLogger("monge")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(_Notes())


class _Notes(logging.Handler):
    """Shows what the library says while it works, such as what takes long."""

    def emit(self, record: logging.LogRecord) -> None:
        notes().print(record.getMessage(), style="dim", markup=False, soft_wrap=True)
