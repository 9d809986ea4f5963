"""Exact acceptance of every registered verifier at one node.

p = target law, q = draft law. Small laws are enumerated: every draw of the candidates, every branch
of the rule. Larger ones go through the closed forms; where neither is possible there is no number,
and the reason stands in its place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64

from monge.acceptance.closed_forms import closed_form
from monge.acceptance.sampling_schemes import (
    SamplingScheme,
    mixed_optima,
    num_candidates,
    optimum,
    sampling_schemes,
)
from monge.core.clocks import SharedClocks
from monge.core.draws import Draws
from monge.core.hub_pairs import HubPairs
from monge.core.independent import Independent
from monge.core.law import DenseLaw, Law, one_hot
from monge.core.proposal import Arbitrary, Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.systematic import Systematic
from monge.core.tree import GrowingTree
from monge.testing.oracle import OracleError, exact_law
from monge.transport.bounds import acceptance_one
from monge.verify.base import NodeRule, Rule, Verifier, unsupported_reason
from monge.verify.registry import VERIFIERS

Vector = Float64[np.ndarray, " vocab"]

MAX_ENUMERATED: Final = 1000
"""Most tuples of candidates times tokens that are enumerated: a second a rule."""

MAX_RUNS: Final = 20_000
"""Most branches of draws and rule together."""

REJECTED: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """P(the emitted token is one of the candidates).

    Args:
        value: The probability, or `None`.
        how: `enumeration`, `closed form`, or why there is no value.
    """

    value: float | None
    how: str


def node_report(
    p: Vector, q: Vector, width: int, on_rule: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Acceptance of every verifier under every way of drafting `width` candidates for which it is exact.

    Args:
        p: Target law, checked, `[vocab]`.
        q: Draft law over the same tokens, checked.
        width: Number of candidates K.
        on_rule: Called after every verifier.

    Returns:
        `rules`: one number a verifier, under the drafting that `drafting` names; `optimum` by
        drafting (`mixed` lists d = 0..K deterministic candidates); `laws`, `gap` and `how`:
        acceptance, distance to the optimum and method by verifier and drafting. `acceptance_one`,
        for i.i.d. candidates: `holds` says whether some rule accepts one of K with probability one,
        `smallest_num_drafts` the smallest K for which one does (`null` if none is enough), and
        `tightest_set` the token ids of the set that asks for it.
    """
    ways = sampling_schemes(q, width)
    best = {way.name: optimum(p, way.proposal) for way in ways}
    target = DenseLaw(torch.from_numpy(p.copy()))
    report: dict[str, Any] = {"rules": {}, "drafting": {}, "laws": {}, "gap": {}, "how": {}}
    for name in VERIFIERS:
        legal = legal_schemes(VERIFIERS.make(name), ways)
        if legal:
            found = {way.name: acceptance(name, target, way.proposal) for way in legal}
            usual = usual_scheme(VERIFIERS.make(name), legal)
            report["drafting"][name] = usual
            report["rules"][name] = None if usual is None else found[usual].value
            report["laws"][name] = {way: one.value for way, one in found.items()}
            report["how"][name] = {way: one.how for way, one in found.items()}
            report["gap"][name] = {
                way: _difference(best[way], one.value) for way, one in found.items()
            }
        on_rule()
    always = acceptance_one(p, q)
    report["acceptance_one"] = {
        "holds": always.holds(width),
        "smallest_num_drafts": always.num_drafts,
        "tightest_set": list(always.tokens),
    }
    return report | {"optimum": best | {"mixed": mixed_optima(p, q, width)}}


def legal_schemes(rule: Rule, ways: tuple[SamplingScheme, ...]) -> list[SamplingScheme]:
    """Return the sampling schemes for which a rule is exact.

    `single` only where it takes no more than one candidate.
    """
    legal = []
    for way in ways:
        count = 1 if way.name == "single" else num_candidates(way.proposal)
        if unsupported_reason(rule, {type(way.proposal)}, count) is None and (
            way.name != "single" or rule.max_width == 1
        ):
            legal.append(way)
    return legal


def usual_scheme(rule: Rule, legal: list[SamplingScheme]) -> str | None:
    """The drafting that stands for a rule.

    Distinct draws for one made for them, else the first that is legal.

    `None` where nothing but top tokens is legal: all rules are the target walk there, and the
    number would not be theirs.
    """
    is_for_distinct = WithoutReplacement in rule.accepts and Arbitrary not in rule.accepts
    names = [way.name for way in legal if way.name != "top"]
    if is_for_distinct and "without_replacement" in names:
        return "without_replacement"
    return names[0] if names else None


def acceptance(name: str, target: Law, proposal: Proposal) -> Acceptance:
    """Exact acceptance of a registered verifier.

    Args:
        name: Its name.
        target: Target law.
        proposal: Candidates for which it is exact.
    """
    rule = VERIFIERS.make(name)
    if (
        rule.is_enumerable
        and num_tuples(proposal) * target.sparse().probs.numel() <= MAX_ENUMERATED
    ):
        try:
            masses = accepted_masses(rule, target, proposal)
        except OracleError as error:
            return Acceptance(value=None, how=str(error))
        return Acceptance(value=math.fsum(masses.values()), how="enumeration")
    p = target.probs if isinstance(target, DenseLaw) else None
    value = None if p is None else closed_form(name, p.cpu().numpy(), proposal)
    if value is not None:
        return Acceptance(value=value, how="closed form")
    reason = (
        "too many tuples to enumerate"
        if rule.is_enumerable
        else "draws positions, which cannot be enumerated"
    )
    return Acceptance(value=None, how=f"no closed form, and {reason}")


def accepted_masses(rule: Rule, target: Law, proposal: Proposal) -> dict[int, float]:
    """P(the rule accepts this candidate) for every token, by enumeration of draws and decisions."""
    if isinstance(proposal, SharedClocks):
        # What the races are to a rule that has no part in them.
        proposal = Iid(proposal.law, proposal.width)

    def accepted(draws: Draws) -> int:
        candidates = proposal.draw(draws)
        if isinstance(rule, NodeRule):
            token = rule.emit(target, proposal, candidates, draws)
            return token if token in candidates else REJECTED
        return _one_level(rule, target, proposal, draws)

    law = exact_law(accepted, max_runs=MAX_RUNS)
    law.pop(REJECTED, None)
    return law


def num_tuples(proposal: Proposal) -> float:
    """Return an upper bound of the number of tuples that can be drawn."""
    count = math.inf
    match proposal:
        case Deterministic():
            count = 1.0
        case Iid() | Mixed() | SharedClocks():
            count = float(proposal.law.sparse().probs.numel()) ** proposal.width
        case WithoutReplacement():
            support = proposal.law.sparse().probs.numel()
            count = float(math.perm(support, min(support, proposal.width)))
        case Systematic():
            count = float(len(proposal.cells.candidates))
        case HubPairs():
            count = 2.0 * proposal.law.sparse().probs.numel()
        case Independent():
            count = math.prod(float(law.sparse().probs.numel()) for law in proposal.laws)
        case _:
            pass  # a way of drawing that nobody has counted: closed forms only
    return count


def _one_level(rule: Verifier, target: Law, proposal: Proposal, draws: Draws) -> int:
    tree = GrowingTree(0)
    tree.grow(0, proposal, draws)
    grown = tree.finish()
    # What follows an accepted leaf decides nothing here: a point mass has one branch.
    laws = [target, *[one_hot(0)] * (grown.num_nodes - 1)]
    path = rule.verify(grown, laws, draws).path
    return grown.token_ids[path[0]] if path else REJECTED


def _difference(best: float | None, value: float | None) -> float | None:
    return None if best is None or value is None else best - value
