"""Messages that a user types, pastes or pipes."""

import io
import sys
from collections.abc import Callable, Iterator
from typing import Final

_QUOTES: Final = '"""'


def messages() -> Iterator[str]:
    """Yield messages of the user: lines, pasted texts, and what stands between triple quotes.

    A backslash at the end of a line continues the message on the next line. Lines of a terminal can
    be edited, and Ctrl-C drops the unfinished message.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):  # a wrong byte fails its message, not the chat
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        piped = (line.removesuffix("\n") for line in sys.stdin)
        while (text := _message(lambda prompt: next(piped, None))) is not None:
            if text:
                yield text
        return
    import readline

    # A pasted text is read as a whole; Python turns this off. Where libedit stands in for GNU
    # readline there is no such setting, and each pasted line is a message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            text = _message(_typed)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        if text is None:
            sys.stderr.write("\n")
            return
        if text:
            yield text


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


def _message(line: Callable[[str], str | None]) -> str | None:
    """Read a message by a function that shows a prompt and reads a line; `None` at the end of input."""
    first = line("\n> ")
    if first is None:
        return None
    lines = [first]
    if "\n" not in first and first.lstrip().startswith(_QUOTES):
        lines = [first.lstrip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES) and (more := line("... ")) is not None:
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip()
    while lines[-1].endswith("\\") and (more := line("... ")) is not None:
        lines[-1:] = [lines[-1].removesuffix("\\"), more]
    return "\n".join(lines).strip()
