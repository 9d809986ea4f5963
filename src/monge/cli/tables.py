"""How commands print tables: for a terminal of any width, or as Markdown."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from monge.cli.console import output

_WIDE: Final = 10_000
_NARROWEST: Final = 22
"""Fewest characters of a column of prose beside other columns."""
_INDENT: Final = 2
_GAP: Final = 2
_MARGIN: Final = 120
"""Width of lines where standard output is no terminal and COLUMNS is not set."""


def plain_table(
    title: str, first: str, columns: Sequence[str] = (), justify: Literal["left", "right"] = "right"
) -> Table:
    """A table without edges: the first column names rows, the others are numbers unless justified otherwise."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    table.add_column(first, style="bold cyan", no_wrap=True)
    for column in columns:
        table.add_column(column, justify=justify, no_wrap=True)
    return table


def print_tables(
    tables: Iterable[Table], *, markdown: bool = False, console: Console | None = None
) -> None:
    """Print tables so that no cell is cut.

    A table that is too wide for the console has the name of a row on a line of its own, and the
    other cells below it: aligned if they fit, else each with the name of its column.

    Args:
        tables: Their first column names the rows; columns that may wrap hold prose.
        markdown: Whether to print Markdown tables instead.
        console: Where to; `None` for standard output.
    """
    console = output(_MARGIN) if console is None else console
    for number, table in enumerate(tables):
        if number > 0 and not markdown:
            console.print()
        if markdown:  # the empty line ends the table
            console.print(as_markdown(table) + "\n", markup=False, soft_wrap=True)
        elif _needed_width(table, console) <= console.width:
            console.print(table)
        else:
            _print_stacked(table, console)


def as_markdown(table: Table) -> str:
    """A table in the Markdown of GitHub, with its title and caption as paragraphs."""
    columns = table.columns
    lines = ["| " + " | ".join(_escaped(column.header) for column in columns) + " |"]
    lines.append("|" + "|".join("--:" if _is_number(column) else "---" for column in columns) + "|")
    lines += ["| " + " | ".join(map(_escaped, row)) + " |" for row in _rows(table)]
    title = [f"**{_plain(table.title)}**", ""] if table.title else []
    caption = ["", " ".join(_plain(table.caption).split())] if table.caption else []
    return "\n".join([*title, *lines, *caption])


def _rows(table: Table) -> list[tuple[str, ...]]:
    cells = [[_plain(cell) for cell in column.cells] for column in table.columns]
    return list(zip(*cells, strict=True))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _escaped(cell: object) -> str:
    return " ".join(_plain(cell).replace("|", "\\|").split())


def _is_number(column: Column) -> bool:
    return column.justify == "right"


def _needed_width(table: Table, console: Console) -> int:
    """Width at which no name and no number wraps, and prose has room."""
    spare = 0
    for number, column in enumerate(table.columns):
        if number > 0 and not column.no_wrap:
            width = max(map(len, (_plain(column.header), *map(_plain, column.cells))))
            spare += max(0, width - _NARROWEST)
    options = console.options.update(width=_WIDE)
    caption, title = table.caption, table.title
    table.caption = table.title = None  # these wrap
    try:
        return Measurement.get(console, options, table).maximum - spare
    finally:
        table.caption, table.title = caption, title


def _print_stacked(table: Table, console: Console) -> None:
    rows, others = _rows(table), table.columns[1:]
    headers = [_plain(column.header) for column in others]
    widths = [
        max(len(header), *(len(row[place]) for row in rows))
        for place, header in enumerate(headers, start=1)
    ]
    fits = _INDENT + sum(widths) + _GAP * (len(widths) - 1) <= console.width
    is_aligned = fits and all(column.no_wrap for column in others)

    def aligned(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if _is_number(column) else cell.ljust(width)
            for cell, width, column in zip(cells, widths, others, strict=True)
        ]
        return " " * _INDENT + (" " * _GAP).join(padded).rstrip()

    if table.title:
        console.print(Text(_plain(table.title), style="bold"))
    first = _plain(table.columns[0].header)
    console.print(Text(f"{first}\n{aligned(headers)}" if is_aligned else first, style="dim"))
    for name, *cells in rows:
        if name:
            console.print(Text(name, style="bold cyan"))
        if is_aligned:
            console.print(aligned(cells), markup=False, soft_wrap=True)
            continue
        shown = [f"{header}: {cell}" for header, cell in zip(headers, cells, strict=True) if cell]
        for line in _filled(shown, console.width - _INDENT):
            console.print(Text(" " * _INDENT + line))
    if table.caption:
        console.print(Text(_plain(table.caption), style="dim"))


def _filled(pieces: Sequence[str], width: int) -> list[str]:
    """Lines of several pieces, which are not divided; a longer one wraps by itself."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(", ") + len(piece) <= width:
            lines[-1] += f", {piece}"
        else:
            lines.append(piece)
    return lines
