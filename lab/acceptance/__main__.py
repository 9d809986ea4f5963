"""`python -m lab.acceptance`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from lab.acceptance.log import LogSettings
from lab.acceptance.measure import (
    PROMPTS_PER_TASK,
    QUICK,
    QUICK_PROMPTS_PER_TASK,
    AcceptanceSettings,
    measure_acceptance,
    write_document,
)
from lab.acceptance.nodes import OPTIMUM
from lab.command import run
from monge.bench.pair import load_pair
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.options import check_out_folder
from monge.cli.progress import call_bar
from monge.core.extras import require
from monge.prompts import asked_prompts
from monge.transport.inputs import check_candidates

OUT: Final = Path("out/acceptance")
BEST_ROWS: Final = 12
PUBLISHED: Final = ("k_seq", "recursive_rejection", "multipath_block", "traversal", "layer")


@reported
def main(
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    prompts: Path | None = options.measuring(
        None, "Text lines, or *.jsonl.", "the shipped prompts"
    ),
    quick: bool = options.switch(
        "--quick", options.MEASURING, "Few texts, small trees: within two minutes."
    ),
    temperature: list[float] | None = options.measuring(
        None, "Above 0; may be repeated.", AcceptanceSettings().temperatures
    ),
    candidates: list[int] | None = options.measuring(
        None, "K at a node; may be repeated.", AcceptanceSettings().candidates
    ),
    nodes: list[int] | None = options.measuring(
        None, "Node budget of trees; may be repeated.", AcceptanceSettings().budgets
    ),
    draft_top_k: int | None = options.measuring(
        None, "Tokens that the draft law keeps.", LogSettings().draft_top_k
    ),
    per_task: int | None = options.measuring(
        None, "Prompts of a task; of a file all.", PROMPTS_PER_TASK, "--prompts-per-task"
    ),
    seed: int | None = options.measuring(
        None, "Of texts, trees and decisions.", LogSettings().seed
    ),
    threads: options.Threads = None,
    out: Path = options.option(OUT, options.OUTPUT, "Folder for JSON and plots."),
    plots: bool = options.option(
        True, options.OUTPUT, "Draw PNG plots.", None, "--plots/--no-plots"
    ),
    as_json: options.Json = False,
) -> None:
    """Measure acceptance of every rule, drafting and tree shape over the laws of a real pair.

    The target writes texts; along them both laws are logged. At single nodes acceptance is computed
    in closed form where there is one, and compared with the optimum; on whole trees real rounds
    give tokens per target forward. No time is measured. Intervals hold the middle 95% of resampled
    texts. With `--json` the last line of standard output is one JSON object.

    **Examples**

        python -m lab.acceptance --quick
        python -m lab.acceptance --temperature 1 --candidates 2 --candidates 4 --nodes 16
        python -m lab.acceptance --target ./my-target --draft ./my-draft --draft-top-k 256 --json | tail -n 1 > acceptance.json
    """
    quiet_host()
    check_out_folder(out)
    if plots:
        require("lab", "a plot", otherwise="run with --no-plots")
    options.check_positive(draft_top_k=draft_top_k)
    options.set_threads(threads)
    lists = {"temperatures": temperature, "candidates": candidates, "budgets": nodes}
    settings = settings_of(quick, lists, options.given(draft_top_k=draft_top_k, seed=seed))
    default = QUICK_PROMPTS_PER_TASK if quick else PROMPTS_PER_TASK
    shown = asked_prompts(prompts, per_task=per_task, default=default)
    pair = load_pair(
        target, draft, **options.given(dtype=dtype, device=device, attention=attention)
    )
    with call_bar() as progress:
        document = measure_acceptance(pair, shown, settings, progress=progress)
    files = [write_document(document, out)]
    if plots:
        from lab.acceptance.plots import write_plots

        files += write_plots(document, out)
    report(document, files)
    if as_json:
        print(json.dumps(document))


def settings_of(
    quick: bool, lists: dict[str, list[Any] | None], log: dict[str, int]
) -> AcceptanceSettings:
    """The settings that were asked for; what was not given is the library's own."""
    for count in lists.get("candidates") or ():
        check_candidates("--candidates", count)
    base = QUICK if quick else AcceptanceSettings()
    given = {name: tuple(values) for name, values in lists.items() if values}
    return replace(base, log=replace(base.log, **log), **given)


def report(document: dict[str, Any], files: Sequence[Path]) -> None:
    """Tables by temperature, and where the files are."""
    console = output(110)
    for temperature in document["settings"]["temperatures"]:
        console.print(node_table(document, temperature))
        console.print()
        for part, title, table in (
            ("rounds", "best shapes and rules", round_table),
            ("paths", "independent paths", path_table),
        ):
            records = [record for record in document[part] if record["temperature"] == temperature]
            if records:
                console.print(table(records, f"T = {temperature:g}: {title}"))
                console.print()
    console.print("written: " + ", ".join(map(str, files)), soft_wrap=True)


def node_table(document: dict[str, Any], temperature: float) -> Table:
    """Acceptance at a node by K: every rule under the drafting that it is made for, and the optima."""
    records = [record for record in document["nodes"] if record["temperature"] == temperature]
    counts = document["settings"]["candidates"]
    table = _table(
        f"T = {temperature:g}: acceptance at a node [95%]",
        ["drafting", "rule", *(f"K = {count}" for count in counts)],
    )
    rows = [record for record in records if record["rule"] == OPTIMUM or record["is_usual"]]
    for drafting, rule in dict.fromkeys((record["drafting"], record["rule"]) for record in rows):
        cells = {
            r["candidates"]: r["acceptance"]
            for r in rows
            if (r["drafting"], r["rule"]) == (drafting, rule)
        }
        table.add_row(
            drafting, rule, *(_interval(cells[count]) if count in cells else "" for count in counts)
        )
    return table


def round_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """The shapes and rules with most tokens per target forward."""
    columns = ["tree", "nodes", "rule", "block efficiency", "over rejection", "over one draft"]
    table = _table(f"{title}, tokens per target forward [95%]", columns)
    best = sorted(records, key=lambda record: -record["block_efficiency"]["mean"])[:BEST_ROWS]
    for record in best:
        measured = (
            record[name] for name in ("block_efficiency", "over_rejection", "over_one_draft")
        )
        cells = ("" if estimate is None else _interval(estimate) for estimate in measured)
        table.add_row(record["tree"], f"{record['num_nodes']:.1f}", record["rule"], *cells)
    return table


def path_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """SpecTr's table: for every number and length of paths, the best of all rules, and the published ones."""
    columns = ["tree", "best rule", "block efficiency", "over one draft", *PUBLISHED]
    table = _table(
        f"{title}, tokens per target forward, and over one draft of that length [95%]", columns
    )
    for tree in dict.fromkeys(record["tree"] for record in records):
        rules = {record["rule"]: record for record in records if record["tree"] == tree}
        best = max(rules.values(), key=lambda record: record["block_efficiency"]["mean"])
        gains = [
            ""
            if rule not in rules or rules[rule]["over_one_draft"] is None
            else f"{rules[rule]['over_one_draft']['mean']:.3f}"
            for rule in PUBLISHED
        ]
        gain = "" if best["over_one_draft"] is None else _interval(best["over_one_draft"])
        table.add_row(tree, best["rule"], _interval(best["block_efficiency"]), gain, *gains)
    return table


def _interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} [dim]{estimate['low']:.2f}-{estimate['high']:.2f}[/]"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column)
    return table


if __name__ == "__main__":
    run(main)
