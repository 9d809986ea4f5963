"""`python -m lab.verify`."""

import json
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.command import run
from lab.verify.laws import RULES, VOCAB_SIZES, measure_laws
from lab.verify.measure import QUICK, VerifySettings, measure
from monge.backends.cpu.law_masses import load_law_masses
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import notes, output, reported
from monge.loading.networks import usable_device


@reported
def main(
    *,
    rules: list[str] | None = options.measuring(
        None, "A rule, with settings; may be repeated.", "all of them"
    ),
    vocab: list[int] | None = options.measuring(
        None, "Size of the vocabulary; may be repeated.", VerifySettings().vocab_sizes
    ),
    support: list[int] | None = options.measuring(
        None, "Tokens of the draft law, 0 for all; may be repeated.", VerifySettings().supports
    ),
    candidates: list[int] | None = options.measuring(
        None, "Candidates of a node; may be repeated.", VerifySettings().widths
    ),
    tree: list[str] | None = options.measuring(
        None, "A tree, measured in place of nodes; may be repeated.", "none"
    ),
    laws: bool = options.switch(
        "--laws",
        options.MEASURING,
        "Measure laws of logits under sampling rules in place of rules; trees under the same.",
    ),
    batch: list[int] | None = options.measuring(
        None, "Nodes or trees of one measurement; may be repeated.", VerifySettings().batch_sizes
    ),
    repeats: int | None = options.measuring(
        None, "Measurements of each cell.", VerifySettings().repeats
    ),
    quick: bool = options.switch(
        "--quick", options.MEASURING, "One vocabulary, two supports: within a minute."
    ),
    device: str = options.option("cpu", options.RUNNING, "cpu, cuda, ..."),
    threads: int = options.option(1, options.RUNNING, "Threads of torch."),
    as_json: options.Json = False,
) -> None:
    """Time every acceptance rule at one node or one tree, beside softmax and multinomial of one row of logits.

    The laws are synthetic and made outside the clock; what is timed is the rule with its look-ups,
    its residual and the draw of the emitted token. With `--tree` a whole tree is verified, and the
    target's laws are made of its logits inside the clock; a time is the mean over eight verdicts
    of a batch, each from other draws. A rule that is too slow at a size, or not exact for the candidates, is
    listed with the reason. With `--laws` the law of one row of logits is made under several sampling
    rules, peaked and flat, beside that at temperature 1; with `--tree` too, trees are verified under
    each of them. With `--json` the last line of standard output is one JSON object.

    **Examples**

        python -m lab.verify --quick
        python -m lab.verify --rules optimal --rules k_seq --vocab 131072 --candidates 8
        python -m lab.verify --laws --repeats 50
        python -m lab.verify --laws --tree "chain(3)" --rules block --vocab 49152 --support 0 --batch 1
        python -m lab.verify --vocab 49152 --support 64 --tree "chain(4)" --tree "fixed_width((4, 1, 1, 1), 'iid')"
    """
    options.set_threads(threads)
    if usable_device(device).type == "cpu":
        load_law_masses()  # as compiled backends do
    if laws and not tree:
        document = measure_laws(
            vocab or VOCAB_SIZES, repeats or VerifySettings().repeats, usable_device(device)
        )
        report_laws(document)
        if as_json:
            print(json.dumps(document))
        return
    lists = {
        "rules": rules,
        "vocab_sizes": vocab,
        "supports": support,
        "widths": candidates,
        "batch_sizes": batch,
    }
    lists["trees"] = tree
    settings = replace(
        QUICK if quick else VerifySettings(),
        **{name: tuple(some) for name, some in lists.items() if some},
        **options.given(repeats=repeats, sampling=RULES if laws else None),
    )
    columns, console = (
        (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")),
        notes(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        document = measure(
            settings, usable_device(device), lambda name: progress.update(task, description=name)
        )
    report(document)
    if as_json:
        print(json.dumps(document))


def _title(cell: dict[str, Any]) -> str:
    laws = f"vocabulary {cell['vocab']}, support {cell['support']}"
    if "tree" in cell:
        tree = f"{cell['tree']} of {cell['nodes']} nodes"
        return f"{laws}, {tree}, {cell['sampling']}, batch {cell['batch']}"
    return f"{laws}, {cell['width']} candidates, batch {cell['batch']}"


def report(document: dict[str, Any]) -> None:
    """One table a cell, fastest rule first; what was not measured, and why, below it."""
    part = "tree" if document["settings"]["trees"] else "node"
    console = output(110)
    cells: dict[str, list[dict[str, Any]]] = {}
    for record in document["cells"]:
        cells.setdefault(_title(record), []).append(record)
    for title, records in cells.items():
        measured = sorted(
            (one for one in records if "ratio" in one), key=lambda one: one[f"{part}_s"]["median"]
        )
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        ratios = {"x softmax + multinomial": "ratio"}
        ratios |= {"x reading once": "reads"} if part == "tree" else {}
        for column in ("rule", f"us a {part}", *ratios):
            shown.add_column(column, justify="left" if column == "rule" else "right", no_wrap=True)
        for one in measured:
            numbers = (_ranged(one[name], 1.0, 3) for name in ratios.values())
            shown.add_row(one["rule"], _ranged(one[f"{part}_s"], 1e6, 0), *numbers)
        console.print(shown)
        for one in records:
            if "skipped" in one:
                console.print(
                    f"{one['rule']}: {one['skipped']}", style="dim", markup=False, soft_wrap=True
                )
        console.print()
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)


def report_laws(document: dict[str, Any]) -> None:
    """One table a vocabulary and kind of logits."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for record in document["cells"]:
        cells.setdefault(f"vocabulary {record['vocab']}, {record['logits']}", []).append(record)
    for title, records in cells.items():
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in ("rules", "us a law", "x temperature 1", "x reading once", "tokens"):
            shown.add_column(column, justify="left" if column == "rules" else "right")
        for one in records:
            ratios = (_ranged(one[name], 1.0, 2) for name in ("ratio", "reads"))
            numbers = (_ranged(one["law_s"], 1e6, 0), *ratios)
            shown.add_row(one["rules"], *numbers, str(one["support"]))
        output(110).print(shown)
    if (note := busy_note()) is not None:
        output(110).print(note, style="yellow", markup=False)


def _ranged(summary: dict[str, float], unit: float, digits: int) -> str:
    low, median, high = (summary[name] * unit for name in ("low", "median", "high"))
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    run(main)
