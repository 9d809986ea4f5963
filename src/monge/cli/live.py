"""Text that grows on a terminal, above a line of progress."""

import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monge.cli.console import redrawing
from monge.cli.progress import BAR_WIDTH, Stage


class LiveText:
    """Prints finished lines for good and redraws only the line that still grows.

    Long texts scroll as usual.

    Args:
        console: A terminal.
        total: Tokens at most, for the bar.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._tail = console, ""
        self._stage = Stage(name="tokens", clock=time.monotonic, total=total)
        self._live = Live(console=console, transient=True, refresh_per_second=12)
        self._shown = ExitStack()

    def __enter__(self) -> "LiveText":
        self._shown.enter_context(redrawing(self._console))
        self._shown.enter_context(self._live)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.close()
        self._console.print(Text(self._tail))

    def add(self, text: str, num_tokens: int) -> None:
        """Show new text, and how many tokens there are by now."""
        *lines, self._tail = (self._tail + text).split("\n")
        width = self._console.width
        while len(self._tail) >= width:
            head, space, rest = self._tail[:width].rpartition(" ")
            lines.append(head if space else self._tail[:width])
            self._tail = (rest if space else "") + self._tail[width:]
        for line in lines:
            self._live.console.print(Text(line))
        self._stage.reach(num_tokens)
        bar = ProgressBar(total=self._stage.total, completed=num_tokens, width=BAR_WIDTH)
        line = Table.grid(padding=(0, 1))
        elapsed = self._stage.elapsed_s
        rate = f", {num_tokens / elapsed:.0f} tokens/s" if elapsed else ""
        figures = Text(self._stage.figures + rate, style="dim")
        line.add_row(Text("tokens", style="dim"), bar, figures)
        self._live.update(Group(Text(self._tail), line))
