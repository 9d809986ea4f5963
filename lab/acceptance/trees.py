"""`python -m lab.acceptance.trees`: the expected accepted tokens of every verifier on a small tree, exactly."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.acceptance.tree_tables import table_of
from lab.acceptance.tree_values import BY_NODES, BY_TREES, tree_report
from lab.command import run
from monge.cli import options
from monge.cli.acceptance import above, shown_gap, shown_number
from monge.cli.console import plain_table, print_tables, reported, say_error, show
from monge.cli.progress import working
from monge.transport.inputs import read_document
from monge.verify.registry import VERIFIERS


@reported
def main(
    *,
    tree: Annotated[Path, typer.Argument(help="JSON file with laws by prefix and a shape.")],
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Compute the expected accepted tokens of every verifier on a tree of tabular laws.

    From a file with a small vocabulary, laws by prefix and a shape: the expected number of accepted
    tokens of every rule, the multi-step optimum, and the layer bound. The head of
    `lab/acceptance/tree_tables.py` shows such a file.

    The exit status is 1 if a rule is above the optimum.
    """
    with working() as work:
        advance = work.stage("valuing rules", len(VERIFIERS)).advance
        report = tree_report(table_of(read_document(tree)), advance)
    wrong = above(report["gap"])
    if as_json:
        print(json.dumps(report | {"above_the_optimum": wrong}))
    else:
        _show(report, markdown=markdown)
    for name in wrong:
        say_error(f"{name} accepts more than the optimum of lossless rules, so the rule is wrong")
    if wrong:
        raise typer.Exit(1)


def _show(report: dict[str, Any], *, markdown: bool) -> None:
    title = f"expected accepted tokens, candidates {report['candidates']} {report['drafting']}, {report['num_trees']} trees"
    table = plain_table(title, "rule", ["accepted tokens", "below the optimum"])
    for name, value in report["rules"].items():
        table.add_row(name, shown_number(value), shown_gap(report["gap"][name]))
    table.add_section()
    table.add_row("optimum", shown_number(report["optimum"]), "")
    table.add_row("layer bound", shown_number(report["layer_bound"]), "")
    print_tables([table], markdown=markdown)
    for name, how in report["how"].items():
        if how not in {BY_NODES, BY_TREES}:
            show(f"{name}: {how}", "dim")


if __name__ == "__main__":
    run(main)
