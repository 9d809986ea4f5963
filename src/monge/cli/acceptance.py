"""`monge acceptance`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from monge.acceptance.inputs import check_candidates, check_lengths, read_law
from monge.acceptance.node import node_report
from monge.acceptance.table import read_table
from monge.acceptance.tree import BY_NODES, BY_TREES, tree_report
from monge.cli import options
from monge.cli.console import output, reported
from monge.cli.progress import working
from monge.cli.tables import plain_table, print_tables
from monge.core.errors import OptionError
from monge.verify.registry import VERIFIERS

NODE: Final = "One node"
MAX_TOKENS_SHOWN: Final = 8
TREE: Final = "A whole tree"


@reported
def acceptance(
    *,
    target_probs: Annotated[
        str | None,
        options.option(
            "--target-probs",
            help="Target law: 0.5,0.3,0.2, or @file (.npy, .json, text).",
            panel=NODE,
        ),
    ] = None,
    draft_probs: Annotated[
        str | None,
        options.option(
            "--draft-probs", help="Draft law over the same tokens, in the same form.", panel=NODE
        ),
    ] = None,
    candidates: Annotated[
        int | None, options.option("--candidates", help="Candidates of the node, K.", panel=NODE)
    ] = None,
    tree: Annotated[
        Path | None,
        options.option("--tree", help="JSON file with laws by prefix and a shape.", panel=TREE),
    ] = None,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Compute how often every acceptance rule keeps a drafted token, exactly.

    **One node.** From a target law, a draft law and a number of candidates: P(the emitted token is
    one of the candidates) for every rule and every way of drafting for which it is exact, the
    optimum for each way, and the gap. Small laws are listed, large ones go through closed forms.
    Nothing is normalised: a law that does not sum to one is refused. The acceptance-one condition
    says from how many i.i.d. candidates on some rule accepts one with probability one.

    **A whole tree.** From a file with a small vocabulary, laws by prefix and a shape: the expected
    number of accepted tokens of every rule, the multi-step optimum, and the layer bound.
    `docs/acceptance.md` shows such a file.

    **Examples**

        monge acceptance --target-probs 0.5,0.3,0.2 --draft-probs 0.2,0.3,0.5 --candidates 2
        monge acceptance --target-probs @p.npy --draft-probs @q.npy --candidates 4 --json
        monge acceptance --tree tree.json
    """
    if tree is not None:
        if target_probs is not None or draft_probs is not None or candidates is not None:
            raise OptionError(
                "--tree brings its own laws and candidates; leave the other options "
                "out, or leave it out"
            )
        table = read_table(tree)
        with _counted() as on_rule:
            report = tree_report(table, on_rule)
        show = _show_tree
    else:
        report = _node_report(target_probs, draft_probs, candidates)
        show = _show_node
    if as_json:
        print(json.dumps(report))
    else:
        show(report, markdown=markdown)


def _node_report(
    target_probs: str | None, draft_probs: str | None, candidates: int | None
) -> dict[str, Any]:
    if target_probs is None or draft_probs is None or candidates is None:
        raise OptionError("give --target-probs, --draft-probs and --candidates, or a --tree file")
    target, draft = read_law("--target-probs", target_probs), read_law("--draft-probs", draft_probs)
    check_lengths(target.size, draft.size)
    check_candidates("--candidates", candidates)
    with _counted() as on_rule:
        report = node_report(target, draft, candidates, on_rule)
    return report | {"candidates": candidates, "vocabulary": target.size}


@contextmanager
def _counted() -> Iterator[Callable[[], None]]:
    with working() as work:
        yield work.stage("valuing rules", len(VERIFIERS)).advance


def _show_node(report: dict[str, Any], *, markdown: bool) -> None:
    title = f"{report['candidates']} candidates, {report['vocabulary']} tokens"
    table = plain_table(title, "drafting")
    table.add_column("rule", no_wrap=True)
    for column in ("acceptance", "below the optimum"):
        table.add_column(column, justify="right", no_wrap=True)
    ways = [way for way in report["optimum"] if way != "mixed"]
    for way in ways:
        table.add_row(way, "optimum", _number(report["optimum"][way]), "", style="bold")
        for name, laws in report["laws"].items():
            if way in laws:
                table.add_row("", name, _number(laws[way]), _number(report["gap"][name][way]))
        table.add_section()
    console = output()
    print_tables([table], markdown=markdown)
    console.print(
        "optimum with d top tokens and K - d draws, d = 0..K: "
        + " ".join(map(_number, report["optimum"]["mixed"]))
    )
    console.print(_acceptance_one(report), markup=False, soft_wrap=True)
    reasons = {
        how
        for name, hows in report["how"].items()
        for way, how in hows.items()
        if report["laws"][name][way] is None
    }
    for reason in sorted(reasons):
        console.print(f"-: {reason}", style="dim", markup=False, soft_wrap=True)


def _acceptance_one(report: dict[str, Any]) -> str:
    """One line about the acceptance-one condition."""
    found = report["acceptance_one"]
    least, tokens = (
        found["smallest_num_drafts"],
        ", ".join(map(str, found["tightest_set"][:MAX_TOKENS_SHOWN])),
    )
    tokens += ", ..." if len(found["tightest_set"]) > MAX_TOKENS_SHOWN else ""
    needed = (
        "no number of drafts is enough"
        if least is None
        else f"from {least} draft{'' if least == 1 else 's'} on"
    )
    tightest = f"; tightest set of tokens: {tokens}" if tokens else ""
    return f"acceptance one, i.i.d. drafts: {'holds' if found['holds'] else 'does not hold'} ({needed}{tightest})"


def _show_tree(report: dict[str, Any], *, markdown: bool) -> None:
    title = f"expected accepted tokens, candidates {report['candidates']} {report['drafting']}, {report['num_trees']} trees"
    table = plain_table(title, "rule", ["accepted tokens", "below the optimum"])
    for name, value in report["rules"].items():
        table.add_row(name, _number(value), _number(report["gap"][name]))
    table.add_section()
    table.add_row("optimum", _number(report["optimum"]), "")
    table.add_row("layer bound", _number(report["layer_bound"]), "")
    console = output()
    print_tables([table], markdown=markdown)
    for name, how in report["how"].items():
        if how not in {BY_NODES, BY_TREES}:
            console.print(f"{name}: {how}", style="dim", markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{max(0.0, value):.6f}"  # a gap of -1e-16 is rounding
