"""`monge acceptance`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from monge.cli import options
from monge.cli.console import plain_table, print_tables, reported, say_error, show
from monge.cli.options import panel
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.oracle.acceptance import node_report
from monge.oracle.proof import prove
from monge.transport.inputs import check_candidates, read_law
from monge.transport.laws import check_pair
from monge.verify.registry import VERIFIERS

_node: Final = panel("One node")
MAX_TOKENS_SHOWN: Final = 8
ROUNDING: Final = 1e-7
"""Differences from an optimum that a linear program may leave."""


@reported
def acceptance(
    rule: Annotated[
        str | None,
        typer.Argument(
            metavar="[RULE]",
            help="A verifier to be enumerated, by name; laws are for all verifiers.",
            show_default=False,
        ),
    ] = None,
    *,
    target_probs: str | None = _node(
        None, "Target law: 0.5,0.3,0.2, or @file (.npy, .json, text)."
    ),
    draft_probs: str | None = _node(None, "Draft law over the same tokens, in the same form."),
    candidates: int | None = _node(None, "Candidates of the node, K."),
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Compute how often every acceptance rule keeps a drafted token, exactly.

    **One node.** From a target law, a draft law and a number of candidates: P(the emitted token is
    one of the candidates) for every rule and every way of drafting for which it is exact, the
    optimum for each way, and the gap. Small laws are listed, large ones go through closed forms.
    Nothing is normalised: a law that does not sum to 1 is refused. The acceptance-one condition
    says from how many i.i.d. candidates on some rule accepts a candidate with probability 1.

    **A rule of your own.** With the name of a verifier: every draw on small random tables is
    enumerated, and the law of the text compared with the target's. Tables and trees are few and
    small: an error there is a disproof, none is evidence and no proof for all sizes.

    The exit status is 1 if a rule is above the optimum or its law is not the target's.

    **Examples**

        monge acceptance my_rule
        monge acceptance --target-probs 0.5,0.3,0.2 --draft-probs 0.2,0.3,0.5 --candidates 2
        monge acceptance --target-probs @p.npy --draft-probs @q.npy --candidates 4 --json
    """
    if rule is not None:
        if (target_probs, draft_probs, candidates) != (None, None, None):
            raise OptionError(
                "a RULE is enumerated on tables of its own; give a RULE or the options of one node"
            )
        _prove(rule, as_json=as_json, markdown=markdown)
        return
    with working() as work:
        advance = work.stage("valuing rules", len(VERIFIERS)).advance
        report = _node_report(target_probs, draft_probs, candidates, advance)
    wrong = above(report["gap"])
    if as_json:
        print(json.dumps(report | {"above_the_optimum": wrong}))
    else:
        _show_node(report, markdown=markdown)
    for name in wrong:
        say_error(
            f"{name} accepts more than the optimum of lossless rules: the text does not have the "
            "target's law, so the rule is wrong"
        )
    if wrong:
        raise typer.Exit(1)


def _prove(rule: str, *, as_json: bool, markdown: bool) -> None:
    proofs = prove(rule)
    is_exact = all(proof.is_exact for proof in proofs)
    if as_json:
        trees = {proof.tree: proof.reason or proof.law_error for proof in proofs}
        print(json.dumps({"rule": rule, "exact": is_exact, "trees": trees}))
    else:
        table = plain_table(f"{rule} on small random tables, enumerated", "tree", ["law error"])
        for proof in proofs:
            table.add_row(proof.tree, proof.reason or f"{proof.law_error:.1e}")
        print_tables([table], markdown=markdown)
        worst = max(proof.law_error for proof in proofs)
        show(
            f"exact in all {len(proofs)} trees: largest law error {worst:.1e}; no proof for other "
            "tables and trees"
            if is_exact
            else "not exact: the text does not have the target's law"
        )
    if not is_exact:
        raise typer.Exit(1)


def _node_report(
    target_probs: str | None,
    draft_probs: str | None,
    candidates: int | None,
    advance: Callable[[], None],
) -> dict[str, Any]:
    if target_probs is None or draft_probs is None or candidates is None:
        raise OptionError("give --target-probs, --draft-probs and --candidates, or a RULE")
    target, draft = read_law("--target-probs", target_probs), read_law("--draft-probs", draft_probs)
    check_pair(target, draft)
    check_candidates("--candidates", candidates)
    report = node_report(target, draft, candidates, advance)
    return report | {"candidates": candidates, "vocabulary": target.size}


def above(gaps: dict[str, Any]) -> list[str]:
    """Return the verifiers that claim to be lossless and accept more than any lossless rule can."""

    def isabove(gap: Any) -> bool:  # noqa: ANN401 (a number, or one for each way of drafting)
        values = gap.values() if isinstance(gap, dict) else (gap,)
        return any(value is not None and value < -ROUNDING for value in values)

    return [name for name in gaps if VERIFIERS.make(name).is_lossless and isabove(gaps[name])]


def _show_node(report: dict[str, Any], *, markdown: bool) -> None:
    drafts = counted(report["candidates"], "candidate")
    columns = ("rule", "acceptance", "below the optimum")
    title = f"{drafts}, {counted(report['vocabulary'], 'token')}"
    table = plain_table(title, "drafting", columns)
    table.columns[1].justify = "left"
    reasons: set[str] = set()
    mixed = report["optimum"].pop("mixed")
    for way, best in report["optimum"].items():
        table.add_row(way, "optimum", shown_number(best), "", style="bold")
        for name, laws in report["laws"].items():
            if way in laws:
                table.add_row(
                    "", name, shown_number(laws[way]), shown_gap(report["gap"][name][way])
                )
                reasons |= {report["how"][name][way]} if laws[way] is None else set()
        table.add_section()
    print_tables([table], markdown=markdown)
    show(
        f"optimum with d top tokens and K - d draws, d = 0..K: {' '.join(map(shown_number, mixed))}"
    )
    show(_acceptance_one(report["acceptance_one"]))
    for reason in sorted(reasons):
        show(f"-: {reason}", "dim")


def _acceptance_one(found: dict[str, Any]) -> str:
    """Return a line about the acceptance-one condition."""
    least, ids = found["smallest_num_drafts"], found["tightest_set"]
    needed = (
        "no number of drafts is enough" if least is None else f"from {counted(least, 'draft')} on"
    )
    if ids:
        more = ["..."] if len(ids) > MAX_TOKENS_SHOWN else []
        shown = ", ".join([*map(str, ids[:MAX_TOKENS_SHOWN]), *more])
        needed += f"; tightest set of tokens: {shown}"
    holds = "holds" if found["holds"] else "does not hold"
    return f"acceptance one, i.i.d. drafts: {holds} ({needed})"


def shown_number(value: float | None) -> str:
    """Return six digits."""
    return "-" if value is None else f"{value:.6f}"


def shown_gap(value: float | None) -> str:
    """Return the gap to the optimum; a value above the optimum is named, unless it is rounding."""
    if value is None or value >= -ROUNDING:
        return shown_number(None if value is None else max(0.0, value))
    return f"ABOVE by {-value:.6f}"
