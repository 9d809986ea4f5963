"""`monge bench rounds`."""

import json
import sys
from dataclasses import replace
from typing import Annotated, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from monge.bench.provenance import busy_note
from monge.bench.rounds import RoundSettings, measure
from monge.cli import options
from monge.cli.bench_options import MEASURING
from monge.cli.console import notes, quiet_host, reported

_DEFAULT: Final = RoundSettings()


def _number(name: str, help: str, value: float | int) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, help=help, panel=MEASURING, default=f"{value:g}")


@reported
def rounds(
    *,
    drafted: Annotated[int | None, _number("--drafted", "Rounds in a row that draft.", _DEFAULT.drafted)] = None,
    plain: Annotated[int | None, _number("--plain", "Plain rounds behind them.", _DEFAULT.plain)] = None,
    depth: Annotated[int | None, _number("--depth", "Tokens of a draft.", _DEFAULT.depth)] = None,
    batch: Annotated[int | None, _number("--batch", "Requests that share rounds.", _DEFAULT.batch)] = None,
    max_new_tokens: Annotated[int | None, _number("--max-new-tokens", "Length of every text.", _DEFAULT.max_new_tokens)] = None,
    repeats: Annotated[int | None, _number("--repeats", "Passes over the prompts.", _DEFAULT.repeats)] = None,
    temperature: Annotated[float | None, _number("--temperature", "0 is greedy.", _DEFAULT.temperature)] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Time plain rounds by their place behind drafts: weights and code of the target are not at hand there at first.

    Who learns what plain decoding costs from such rounds takes it for dearer than it is. With `--json` the last line of
    standard output is one JSON object.

    **Examples**

        monge bench rounds --threads 1
        monge bench rounds --backend compiled --threads 1 --batch 4
        monge bench rounds --backend compiled --threads 1 --drafter ngram
    """
    quiet_host()
    options.set_threads(threads)
    loading = options.given(target=target, draft=draft, drafter=drafter, dtype=dtype, device=device, backend=backend)
    if drafter is None and draft is None:
        loading["drafter"] = "model"
    given = options.given(
        drafted=drafted,
        plain=plain,
        depth=depth,
        batch=batch,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        temperature=temperature,
    )
    document = measure(replace(_DEFAULT, **given, loading=loading), notes().print)
    report(document)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any]) -> None:
    """A row a place, in milliseconds and as a ratio to plain decoding."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    shown = Table(title=f"plain rounds, batch {document['settings']['batch']}", title_justify="left", box=SIMPLE_HEAD)
    for column in ("behind drafts", "ms", "of plain decoding", "lowest", "highest"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in document["places"]:
        ratio = one["ratio"]
        cells = (f"{ratio[name]:.2f}" for name in ("median", "low", "high"))
        shown.add_row(str(one["place"]), f"{one['seconds']['median'] * 1e3:.2f}", *cells)
    shown.add_row("none before", f"{document['plain']['median'] * 1e3:.2f}", "1.00", "", "")
    console.print(shown)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)
