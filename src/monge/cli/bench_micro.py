"""`monge bench micro`."""

import json
from dataclasses import replace
from typing import Annotated, Any, Final

from rich.table import Table

from monge.api import built_in
from monge.bench.micro import StepSettings, measure, num_steps
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.options import measuring, numbers
from monge.cli.progress import call_bar, working
from monge.cli.tables import plain_table, print_tables
from monge.loading.networks import load_network
from monge.options import LoadOptions, changed

_DEFAULT: Final = StepSettings()


@reported
@options.command(only=options.NETWORK)
def micro(
    *,
    backend: Annotated[
        list[str] | None, measuring("--backend", "May be repeated.", ", ".join(_DEFAULT.backends))
    ] = None,
    nodes: Annotated[
        list[int] | None, numbers("--nodes", "Nodes of a forward", _DEFAULT.nodes)
    ] = None,
    batch: Annotated[
        list[int] | None, numbers("--batch", "Requests of a forward", _DEFAULT.batch_sizes)
    ] = None,
    context: Annotated[
        int | None, measuring("--context", "Tokens of each text.", _DEFAULT.context)
    ] = None,
    repeats: Annotated[
        int | None, measuring("--repeats", "Forwards of each cell.", _DEFAULT.repeats)
    ] = None,
    prompt: Annotated[
        list[int] | None,
        measuring("--prompt", "Also read prompts of so many tokens; may be repeated.", "none"),
    ] = None,
    load: LoadOptions,
    threads: options.Threads = None,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Time one forward in every backend, and the reading of prompts.

    Forwards are timed by drafted nodes and by requests: a tree pays only while its further nodes
    cost little. With `--json` the last line of standard output is one JSON object.

    **Examples**

        monge bench micro --threads 1
        monge bench micro --backend eager --backend compiled --prompt 100 --prompt 500
    """
    quiet_host()
    options.set_threads(threads)
    lists = {"backends": backend, "nodes": nodes, "batch_sizes": batch, "prompts": prompt}
    settings = replace(
        _DEFAULT,
        **{name: tuple(some) for name, some in lists.items() if some},
        **options.given(context=context, repeats=repeats),
    )
    loading = changed(load)
    with working("loading the model"):
        network = load_network(loading.pop("target", built_in("target")), **loading)
    with call_bar() as progress:
        progress.total(num_steps(settings))
        document = measure(settings, network, progress.step)
    report(document, markdown=markdown)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any], *, markdown: bool = False) -> None:
    """Tables for every number of requests, and below them what could not run."""
    console, tables = output(), list[Table]()
    cells, names = (
        document["cells"],
        list(dict.fromkeys(one["backend"] for one in document["cells"])),
    )
    for batch in document["settings"]["batch_sizes"]:
        for what, sizes in (
            ("nodes", document["settings"]["nodes"]),
            ("prompt", document["settings"]["prompts"]),
        ):
            if not sizes:
                continue
            columns = (*names, *(f"{name} / {names[0]}" for name in names[1:]))
            shown = plain_table(f"batch {batch} (ms)", what, columns)
            for size in sizes:
                row = [one for one in cells if (one["batch"], one.get(what)) == (batch, size)]
                times = [_ranged(one["step_s"], 1e3) for one in row]
                shown.add_row(
                    str(size), *times, *(f"{one['ratio']['median']:.2f}" for one in row[1:])
                )
            tables.append(shown)
    print_tables(tables, markdown=markdown)
    for name, reason in document["missing"].items():
        console.print(f"{name}: {reason}", style="dim", markup=False, soft_wrap=True)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)


def _ranged(summary: dict[str, float], unit: float) -> str:
    """The median and half of the distance between the quartiles.

    Single forwards are interrupted.
    """
    return f"{summary['median'] * unit:.2f} ±{summary['iqr'] * unit / 2:.2f}"
