"""`monge bench micro`."""

import json
from typing import Any

from rich.table import Table

from monge.bench.micro import StepSettings, measure
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import plain_table, print_tables, show
from monge.cli.progress import call_bar, working
from monge.loading.networks import load_network
from monge.options import LoadOptions, changed


@options.command(only=options.NETWORK)
def micro(
    *,
    settings: StepSettings,
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
    options.set_threads(threads)
    loading = changed(load)
    with working("loading the model"):
        network = load_network(loading.pop("target", None), **loading)
    with call_bar() as on_call:
        document = measure(settings, network, on_call)
    report(document, markdown=markdown)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any], *, markdown: bool = False) -> None:
    """Print tables for every number of requests, and below them what could not run."""
    cells, settings, tables = document["cells"], document["settings"], list[Table]()
    names = list(dict.fromkeys(cell["backend"] for cell in cells))
    columns = (*names, *(f"{name} / {names[0]}" for name in names[1:]))
    for batch in settings["batch_sizes"]:
        for size_of in ("nodes", "prompt"):
            sizes = settings["nodes" if size_of == "nodes" else "prompts"]
            if not sizes:
                continue
            shown = plain_table(f"batch {batch} (ms)", size_of, columns)
            for size in sizes:
                row = [
                    cell for cell in cells if (cell["batch"], cell.get(size_of)) == (batch, size)
                ]
                ratios = (f"{cell['ratio']['median']:.2f}" for cell in row[1:])
                shown.add_row(str(size), *(_ranged(cell["step_s"]) for cell in row), *ratios)
            tables.append(shown)
    print_tables(tables, markdown=markdown)
    for name, reason in document["missing"].items():
        show(f"{name}: {reason}", "dim")
    show(busy_note(), "yellow")


def _ranged(summary: dict[str, float]) -> str:
    """Return the median and half of the distance between the quartiles, in ms: single forwards are interrupted."""
    return f"{1e3 * summary['median']:.2f} ±{1e3 * summary['iqr'] / 2:.2f}"
