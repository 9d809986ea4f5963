"""The terminal: results on standard output, messages and errors on standard error, tables, and JSON files."""

import functools
import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import typer
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from typer.models import ParameterInfo

from monge.core.errors import MongeError
from monge.core.files import write_text
from monge.prompts import Prompt

_WIDTH: Final = 120
"""Width of tables where standard output is no terminal and COLUMNS is not set."""
_PROSE: Final = 22
"""Fewest characters of a column of prose beside other columns."""
_INDENT: Final = (0, 0, 0, 2)
places: Final[list[Callable[[], Console]]] = []
"""Where messages go while bars are drawn or text is streamed, the innermost last."""


def output(width: int | None = None) -> Console:
    """Return standard output; `width` holds where it is no terminal and COLUMNS is not set."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=sys.stdout, highlight=False, width=None if is_known else width)


def show(text: object, style: str | None = None) -> None:
    """Print a line of a result as it is; `None` prints nothing."""
    if text is not None:
        output().print(str(text), style=style, markup=False, soft_wrap=True)


def notes() -> Console:
    """Return standard error, for messages: what is piped stays clean.

    Messages do not mix with text that is being streamed, and stand above bars.
    """
    return places[-1]() if places else Console(file=sys.stderr, highlight=False)


def say(text: object, style: str | None = None) -> None:
    """Print a message as it is."""
    notes().print(str(text), style=style, markup=False, soft_wrap=True)


class streaming:
    """Write text to standard output as it comes, and a line's end after the last of it.

    Messages begin a line if text and messages share a terminal. If the text goes to a pipe or a
    file, messages wait for its end. Keys typed meanwhile are not shown; the next line that is read
    has them.
    """

    def __init__(self) -> None:
        self._waiting, self._is_open, self._is_ended = io.StringIO(), False, False
        self._terminal = _without_echo()

    def __enter__(self) -> Callable[[str], None]:
        self._terminal.__enter__()
        places.append(self.notes)
        return self._write

    def __exit__(self, *_: object) -> None:
        self._terminal.__exit__(None, None, None)
        places.remove(self.notes)
        if not self._is_ended:
            self._write("\n")
        sys.stderr.write(self._waiting.getvalue())

    def notes(self) -> Console:
        """Return where messages go meanwhile."""
        is_terminal = sys.stderr.isatty()
        if not sys.stdout.isatty():
            return Console(file=self._waiting, highlight=False, force_terminal=is_terminal)
        if is_terminal and self._is_open:
            self._write("\n")
            self._is_ended = True
        return Console(file=sys.stderr, highlight=False)

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._is_open, self._is_ended = not text.endswith("\n"), False


@contextmanager
def _without_echo() -> Iterator[None]:
    """Do not show what is typed, if standard input is a terminal."""
    if os.name != "posix" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)

    def set_modes(modes: list[Any]) -> None:
        with suppress(OSError):  # it may not be the terminal that controls this process
            if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
                return  # in the background, where the process would be stopped
        termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    try:
        set_modes([*before[:3], before[3] & ~termios.ECHO, *before[4:]])
        yield
    finally:
        set_modes(before)


def say_error(message: object) -> None:
    """Print a red line on standard error."""
    console = notes()
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(str(message).split()), markup=False, style="red", soft_wrap=True)


def say_raw_text(tokenizer: Any, prompts: Sequence[Prompt], advice: str) -> None:  # noqa: ANN401
    """Say that prompts are raw text, where the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None) and any(
        prompt.messages is None for prompt in prompts
    ):
        text = "this model has a chat template, and prompts are decoded as raw text"
        say(f"{text}; {advice}", "dim")


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Let expected failures of a command end with an error line and a status.

    The status is 2 for an error of the user and 130 for Ctrl-C. A call from Python may leave out
    options.
    """
    parameters = inspect.signature(command).parameters.items()
    infos = {name: p.default for name, p in parameters if isinstance(p.default, ParameterInfo)}

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **({name: info.default for name, info in infos.items()} | options))
        except MongeError as error:
            say_error(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            say("\ninterrupted")
            raise typer.Exit(130) from error

    return run


def quiet_host() -> None:
    """Silence bars and advice of transformers, and let this library's own messages through."""
    from transformers.utils import logging as host_logging

    host_logging.disable_progress_bar()
    host_logging.set_verbosity_error()
    ours = logging.getLogger("monge")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(_Messages())


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), "dim")


def plain_table(
    title: str, first: str, columns: Sequence[str] = (), justify: Literal["left", "right"] = "right"
) -> Table:
    """Return a table without edges; its first column names rows, the others do not wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.show_edge = table.pad_edge = False
    table.add_column(first, style="bold cyan", no_wrap=True)
    for column in columns:
        table.add_column(column, justify=justify, no_wrap=True)
    return table


def print_tables(tables: Iterable[Table], *, markdown: bool = False) -> None:
    """Print tables so that no cell is cut.

    The first column names the rows; columns that may wrap hold prose. A table that is too wide has
    the name of a row on a line of its own, and the other cells below, each with its column's name.
    """
    console = output(_WIDTH)
    for number, table in enumerate(tables):
        if markdown:  # the empty line ends the table
            console.print(as_markdown(table) + "\n", markup=False, soft_wrap=True)
            continue
        if number > 0:
            console.print()
        if sum(map(_width, table.columns)) + 3 * len(table.columns) <= console.width:
            console.print(table)
            continue
        headers = [_plain(column.header) for column in table.columns]
        console.print(Text(_plain(table.title or ""), style="bold"))
        for name, *cells in _rows(table):
            pairs = zip(headers[1:], cells, strict=True)
            shown = [Text(f"{header}: {cell}") for header, cell in pairs if cell]
            console.print(Text(name, style="bold cyan"))
            console.print(Padding(Columns(shown, padding=(0, 2)), _INDENT))
        if table.caption:
            console.print(Text(_plain(table.caption), style="dim"))


def as_markdown(table: Table) -> str:
    """Return a table in the Markdown of GitHub, with its title and caption as paragraphs."""
    rules = ("--:" if column.justify == "right" else "---" for column in table.columns)
    rows = [[_plain(column.header) for column in table.columns], *_rows(table)]
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    header, *lines = ("| " + " | ".join(row) + " |" for row in cells)
    title = [f"**{_plain(table.title)}**", ""] if table.title else []
    caption = ["", " ".join(_plain(table.caption).split())] if table.caption else []
    return "\n".join([*title, header, f"|{'|'.join(rules)}|", *lines, *caption])


def _width(column: Column) -> int:
    """Return the width at which no name and no number wraps, and prose has room."""
    lines = [line for cell in (column.header, *column.cells) for line in _plain(cell).splitlines()]
    widest = max(map(len, lines), default=0)
    return widest if column.no_wrap else min(widest, _PROSE)


def _rows(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(map(_plain, column.cells) for column in table.columns), strict=True))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def write_document(document: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a document as JSON.

    Raises:
        OptionError: If the folder cannot be written to.
    """
    return write_text(folder / name, json.dumps(document, indent=1) + "\n", "results")
