"""The check as tables and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from lab.gpu.rows import Outcome
from monge.cli.console import as_markdown, plain_table


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return the figures, the largest loss first, and what has none, with the warnings."""
    figures = sorted((one for row in outcomes for one in row.figures), key=lambda one: -one.loss)
    shown = plain_table(
        "Figures, the largest loss first", "figure", ("measured", "goal", "verdict")
    )
    rest = plain_table("Not measured, and warnings", "row")
    for table, name in ((shown, "detail"), (rest, "reason")):
        table.add_column(name, overflow="fold")
    for one in figures:
        shown.add_row(*map(escape, one.cells()))
    for one in outcomes:
        for reason in filter(None, (one.missing, *one.warnings)):
            rest.add_row(one.row, escape(reason))
    return [table for table in (shown, rest) if table.row_count]


def markdown(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return a section of a page."""
    parts = [f"## Goals on {about['provenance']['device']}", circumstances(about)]
    parts += map(as_markdown, tables(outcomes))
    return "\n\n".join([*parts, f"```bash\n{about['command']}\n```"]) + "\n"


def circumstances(about: Mapping[str, Any]) -> str:
    """Return size, versions, driver and commit, in a sentence."""
    found = about["provenance"]
    versions = (f"{name} {found['versions'][name]}" for name in ("monge", "torch", "transformers"))
    changes = " with changes" if found["dirty"] else ""
    parts = (
        f"size {about['size']}",
        *versions,
        f"driver {found['driver']}",
        f"commit {found['commit']}",
    )
    return f"{', '.join(parts)}{changes}, {found['time_utc']}."
