"""`monge bench steps`."""

import json
import sys
from dataclasses import replace
from typing import Annotated, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from monge.api import built_in
from monge.bench.provenance import busy_note
from monge.bench.steps import StepSettings, measure
from monge.cli import options
from monge.cli.bench_options import MEASURING, numbers
from monge.cli.console import notes, quiet_host, reported
from monge.engine.loading import load_network

_DEFAULT: Final = StepSettings()


@reported
def steps(
    *,
    backend: Annotated[
        list[str] | None,
        options.option("--backend", help="May be repeated.", panel=MEASURING, default=", ".join(_DEFAULT.backends)),
    ] = None,
    nodes: Annotated[list[int] | None, numbers("--nodes", "Nodes of a forward", _DEFAULT.nodes)] = None,
    batch: Annotated[list[int] | None, numbers("--batch", "Requests of a forward", _DEFAULT.batch_sizes)] = None,
    context: Annotated[
        int | None, options.option("--context", help="Tokens of each text.", panel=MEASURING, default=_DEFAULT.context)
    ] = None,
    repeats: Annotated[
        int | None, options.option("--repeats", help="Forwards of each cell.", panel=MEASURING, default=_DEFAULT.repeats)
    ] = None,
    prompt: Annotated[
        list[int] | None,
        options.option(
            "--prompt", help="Also read prompts of so many tokens; may be repeated.", panel=MEASURING, default="none"
        ),
    ] = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Time one forward of a model in every backend, by drafted nodes and by requests, and the reading of prompts.

    A tree pays only while its further nodes cost little: this shows up to where they do. With `--json` the last line of
    standard output is one JSON object.

    **Examples**

        monge bench steps --threads 1
        monge bench steps --backend eager --backend compiled --prompt 100 --prompt 500
    """
    quiet_host()
    options.set_threads(threads)
    lists = {"backends": backend, "nodes": nodes, "batch_sizes": batch, "prompts": prompt}
    settings = replace(
        _DEFAULT,
        **{name: tuple(some) for name, some in lists.items() if some},
        **options.given(context=context, repeats=repeats),
    )
    source = str(built_in("target")) if target is None else target
    document = measure(settings, load_network(source, **options.given(dtype=dtype, device=device)), notes().print)
    report(document)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any]) -> None:
    """Tables for every number of requests, and below them what could not run."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    cells, names = document["cells"], list(dict.fromkeys(one["backend"] for one in document["cells"]))
    for batch in document["settings"]["batch_sizes"]:
        for what, sizes in (("nodes", document["settings"]["nodes"]), ("prompt", document["settings"]["prompts"])):
            if not sizes:
                continue
            shown = Table(title=f"batch {batch} (ms)", title_justify="left", box=SIMPLE_HEAD)
            for column in (what, *names, *(f"{name} / {names[0]}" for name in names[1:])):
                shown.add_column(column, justify="right", no_wrap=True)
            for size in sizes:
                row = [one for one in cells if (one["batch"], one.get(what)) == (batch, size)]
                times = [_ranged(one["step_s"], 1e3) for one in row]
                shown.add_row(str(size), *times, *(f"{one['ratio']['median']:.2f}" for one in row[1:]))
            console.print(shown)
    for name, reason in document["missing"].items():
        console.print(f"{name}: {reason}", style="dim", markup=False, soft_wrap=True)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)


def _ranged(summary: dict[str, float], unit: float) -> str:
    """The median and half of the distance between the quartiles: single forwards are interrupted."""
    return f"{summary['median'] * unit:.2f} ±{summary['iqr'] * unit / 2:.2f}"
