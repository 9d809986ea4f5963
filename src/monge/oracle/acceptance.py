"""Exact acceptance of every registered verifier at a node.

p = target law, q = draft law. Small laws are enumerated: every draw of the candidates, every branch
of the rule. Larger laws go through the closed forms; if neither is possible, the report gives the
reason instead of a number.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from monge.draft.tree.children import way_of_drawing
from monge.laws.draws import Draws
from monge.laws.law import DenseLaw, Law, one_hot
from monge.laws.proposal import (
    Arbitrary,
    Deterministic,
    Proposal,
    SharedClocks,
    WithoutReplacement,
)
from monge.laws.tree import GrowingTree
from monge.oracle.exact_law import OracleError, exact_law
from monge.oracle.schemes import (
    closed_form,
    mixed_optima,
    num_candidates,
    optimum,
    sampling_schemes,
)
from monge.transport.bounds import acceptance_one
from monge.transport.laws import Vector
from monge.verify.base import NodeRule, Rule, as_verifier, why_no_exactness
from monge.verify.registry import VERIFIERS

MAX_ENUMERATED: Final = 1500
"""Most tuples of candidates times tokens that are enumerated: a second a rule."""

MAX_RUNS: Final = 20_000
"""Most branches of draws and rule together."""

REJECTED: Final = -1


def node_report(
    p: Vector, q: Vector, width: int, on_rule: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Compute the acceptance of every verifier under every way of drafting `width` candidates for which it is exact.

    Args:
        p: Target law, checked, `[vocab]`.
        q: Draft law over the same tokens, checked.
        width: Number of candidates K.
        on_rule: Called after every verifier.

    Returns:
        `rules`: a number per verifier, under the drafting that `drafting` names; `optimum` by
        drafting (`mixed` lists d = 0..K deterministic candidates); `laws`, `gap` and `how`:
        acceptance, distance to the optimum and method by verifier and drafting. `acceptance_one`,
        for i.i.d. candidates: `holds` tells whether some rule accepts one of K candidates with
        probability 1. `smallest_num_drafts` is the smallest K for which a rule does (`null` if no K
        is enough), and `tightest_set` has the token ids of the set that requires it.
    """
    schemes = sampling_schemes(q, width)
    best = {way: optimum(p, proposal) for way, proposal in schemes.items()}
    target = DenseLaw(torch.from_numpy(p.copy()))
    report: dict[str, Any] = {"rules": {}, "drafting": {}, "laws": {}, "gap": {}, "how": {}}
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        if legal := legal_schemes(rule, schemes):
            estimates = {way: acceptance(name, target, proposal) for way, proposal in legal.items()}
            usual = usual_scheme(rule, legal)
            report["drafting"][name] = usual
            report["rules"][name] = None if usual is None else estimates[usual][0]
            report["laws"][name] = {way: value for way, (value, _) in estimates.items()}
            report["how"][name] = {way: how for way, (_, how) in estimates.items()}
            report["gap"][name] = {
                way: None if value is None or (top := best[way]) is None else top - value
                for way, (value, _) in estimates.items()
            }
        on_rule()
    always = acceptance_one(p, q)
    report["acceptance_one"] = {
        "holds": always.holds(width),
        "smallest_num_drafts": always.num_drafts,
        "tightest_set": list(always.tokens),
    }
    return report | {"optimum": best | {"mixed": mixed_optima(p, q, width)}}


def legal_schemes(rule: Rule, schemes: Mapping[str, Proposal]) -> dict[str, Proposal]:
    """Return the sampling schemes for which a rule is exact; `single` only if it takes no more than one candidate."""
    legal: dict[str, Proposal] = {}
    for way, proposal in schemes.items():
        count = 1 if way == "single" else num_candidates(proposal)
        is_exact = why_no_exactness(rule, {type(proposal)}, count) is None
        if is_exact and (way != "single" or rule.max_width == 1):
            legal[way] = proposal
    return legal


def usual_scheme(rule: Rule, legal: Iterable[str]) -> str | None:
    """Return the usual sampling scheme of a rule: distinct draws if the rule is made for them, else the first legal scheme.

    `None` if nothing but top tokens is legal: all rules are sample and match there.
    """
    is_for_distinct = WithoutReplacement in rule.accepts and Arbitrary not in rule.accepts
    names = [way for way in legal if way != "top"]
    if is_for_distinct and "without_replacement" in names:
        return "without_replacement"
    return names[0] if names else None


def acceptance(name: str, target: Law, proposal: Proposal) -> tuple[float | None, str]:
    """Return P(the emitted token is a candidate) of a registered verifier, and how it was computed.

    Args:
        name: Its name.
        target: Target law.
        proposal: Candidates for which it is exact.

    Returns:
        The probability, with `enumeration` or `closed form`; or `None`, with the reason.
    """
    rule, size = VERIFIERS.make(name), target.sparse().probs.numel()
    if rule.is_enumerable and num_tuples(proposal) * size <= MAX_ENUMERATED:
        try:
            masses = accepted_masses(rule, target, proposal)
        except OracleError as error:
            return None, str(error)
        return math.fsum(masses.values()), "enumeration"
    if isinstance(target, DenseLaw):
        value = closed_form(name, target.probs.cpu().numpy(), proposal)
        if value is not None:
            return value, "closed form"
    reason = (
        "too many tuples to enumerate"
        if rule.is_enumerable
        else "draws positions, which cannot be enumerated"
    )
    return None, f"no closed form, and {reason}"


def accepted_masses(rule: Rule, target: Law, proposal: Proposal) -> dict[int, float]:
    """Return P(the rule accepts this candidate) for every token, by enumeration of draws and decisions."""
    if isinstance(proposal, SharedClocks):
        # To a rule that does not run the races, their winners are independent draws.
        proposal = way_of_drawing("iid").propose(proposal.law, proposal.width)

    def accepted(draws: Draws) -> int:
        if isinstance(rule, NodeRule):
            candidates = proposal.draw(draws)
            token = rule.emit(target, proposal, candidates, draws)
            return token if token in candidates else REJECTED
        tree = GrowingTree(0)
        tree.grow(0, proposal, draws)
        grown = tree.finish()
        # Laws after an accepted leaf decide nothing here: a point mass has one branch.
        laws = [target, *[one_hot(0)] * (grown.num_nodes - 1)]
        path = as_verifier(rule).verify(grown, laws, draws).path
        return grown.token_ids[path[0]] if path else REJECTED

    law = exact_law(accepted, max_runs=MAX_RUNS)
    law.pop(REJECTED, None)
    return law


def num_tuples(proposal: Proposal) -> float:
    """Return an upper bound of the number of tuples that can be drawn."""
    if isinstance(proposal, Deterministic):
        return 1.0
    sizes = [law.sparse().probs.numel() for law in proposal.draft_laws]
    return float(math.prod(sizes)) if sizes else math.inf  # closed forms only
