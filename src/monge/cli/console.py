"""What all commands share: where they write, how they fail, and a quiet host."""

import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer
from rich.console import Console

from monge.core.errors import MongeError
from monge.prompts import Prompt


def output(width: int | None = None) -> Console:
    """Standard output, for what was asked for.

    `width` is that of lines where it is no terminal and COLUMNS is not set.
    """
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=sys.stdout, highlight=False, width=None if is_known else width)


_live: Final[list[Console]] = []
"""Consoles of terminals whose last lines are redrawn, the newest last."""
_streams: Final[list["_Stream"]] = []
"""Text that is being written as it comes."""


def notes() -> Console:
    """Standard error, for progress, notes and errors: what is piped stays clean.

    A message stands on lines of its own. Where lines of a terminal are redrawn it is printed above
    them, and where text is being streamed it begins a line, or waits for the end of text that goes
    to a pipe or a file.
    """
    is_terminal = sys.stderr.isatty()
    if is_terminal and _live:
        return _live[-1]
    if _streams and not sys.stdout.isatty():
        return Console(file=_streams[-1].said, highlight=False, force_terminal=is_terminal)
    if _streams and is_terminal:
        _streams[-1].end_line()
    return Console(file=sys.stderr, highlight=False)


@contextmanager
def redrawing(console: Console) -> Iterator[None]:
    """Let messages be printed by a console that redraws lines, if it is a terminal."""
    if console.is_terminal:
        _live.append(console)
    try:
        yield
    finally:
        if console.is_terminal:
            _live.remove(console)


@contextmanager
def streaming() -> Iterator[Callable[[str], None]]:
    """Write text to standard output as it comes, and a line's end after the last of it."""
    stream = _Stream()
    _streams.append(stream)
    try:
        yield stream.write
    finally:
        _streams.remove(stream)
        stream.end()
        if said := stream.said.getvalue():
            sys.stderr.write(said)


class _Stream:
    """Text on standard output, and what was said while it came."""

    def __init__(self) -> None:
        self.said, self._is_open, self._is_ended = io.StringIO(), False, False

    def write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._is_open, self._is_ended = not text.endswith("\n"), False

    def end_line(self) -> None:
        if self._is_open:
            self.write("\n")
            self._is_ended = True

    def end(self) -> None:
        if not self._is_ended:
            self.write("\n")


def say_error(message: object) -> None:
    """One red line on standard error."""
    console = notes()
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(str(message).split()), markup=False, style="red", soft_wrap=True)


def say_raw_text(tokenizer: Any, prompts: Sequence[Prompt], advice: str) -> None:  # noqa: ANN401
    """Say that prompts are raw text, where the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None) and any(one.messages is None for one in prompts):
        notes().print(
            f"this model has a chat template, and prompts are decoded as raw text; {advice}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose expected failures end in one line and a status.

    2 for an error of the user's, 130 for Ctrl-C.
    """

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
    """Keep the host's bars and advice off the terminal: they speak of calls users never made.

    Let our own notes through.
    """
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
