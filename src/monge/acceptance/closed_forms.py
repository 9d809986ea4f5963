"""Acceptance of the registered rules in closed form, for vocabularies of any size.

p = target law, q = draft law. Acceptance is P(the emitted token is among the candidates), whichever
branch emits it.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.acceptance.sampling_schemes import optimum
from monge.core.clocks import SharedClocks
from monge.core.proposal import Deterministic, HubPairs, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.systematic import Systematic
from monge.transport.closed_forms import (
    k_seq_acceptance,
    match_probability,
    naive_tree_acceptance,
    rrs_acceptance,
    rrs_without_replacement_acceptance,
)
from monge.transport.laws import dense
from monge.transport.race import distinct_inclusion

Vector = Float64[np.ndarray, " vocab"]

MAX_RACES: Final = 1000
"""Most drafted tokens for which the inclusion of more than two draws without replacement is computed: megabytes of tables."""

MAX_RECURSION: Final = 100_000
"""Most calls of the recursion over rejected tokens: some seconds on one core."""

_OPTIMAL_FOR: Final[Mapping[str, tuple[type[Proposal], ...]]] = {
    "spechub": (HubPairs,),
    "systematic": (Systematic,),
    "optimal": (Iid, Mixed),
    "layer": (Iid, Mixed, HubPairs, Systematic),  # at a single node, its inner rules
}
"""Rules that attain the optimum of these proposals."""

_OF_ONE_LAW: Final = (Iid, Mixed, WithoutReplacement, SharedClocks)

_KNOWN: Final = _OPTIMAL_FOR.keys() | {
    *("target_walk", "single_draft", "block", "rrs", "rrs_without_replacement", "traversal"),
    *("naive_tree", "k_seq", "greedy", "gumbel"),
}


def closed_form(name: str, p: Vector, proposal: Proposal) -> float | None:
    """Return the acceptance of a registered verifier, or `None` if no closed form is known or it would take too long.

    Args:
        name: Its name.
        p: Target law.
        proposal: Candidates for which the rule is exact.
    """
    if name not in _KNOWN:
        return None
    if isinstance(proposal, Deterministic):  # these rules walk the target where nothing is drawn
        return float(p[list(proposal.token_ids)].sum())
    is_optimal = isinstance(proposal, _OPTIMAL_FOR.get(name, ()))
    value = optimum(p, proposal) if is_optimal else _by_rule(name, p, proposal)
    return None if value is None else min(1.0, max(0.0, value))  # rounding of a sum of masses


def _by_rule(name: str, p: Vector, proposal: Proposal) -> float | None:
    q = dense(proposal.law, p.size) if isinstance(proposal, _OF_ONE_LAW) else np.zeros(0)
    value: float | None = None
    match name, proposal:
        case "gumbel", SharedClocks():
            value = match_probability(p, q, 1) if proposal.width == 1 else None
        case "target_walk" | "gumbel", _:  # candidates without the clocks are met by chance
            included = inclusion(proposal, p.size)
            value = None if included is None else float(p @ included)
        case "single_draft" | "block", Iid(width=1):
            value = float(np.minimum(p, q).sum())
        case "rrs", Iid():
            value = rrs_acceptance(p, [q] * proposal.width)
        case ("rrs", Mixed()) | ("rrs_without_replacement" | "traversal", Mixed(width=1)):
            points = np.zeros((len(proposal.fixed), p.size))
            points[np.arange(len(points)), list(proposal.fixed)] = 1.0
            value = rrs_acceptance(p, [*points, *[q] * proposal.width])
        case "rrs_without_replacement" | "traversal", Iid(width=1):
            value = rrs_acceptance(p, [q])
        case "rrs_without_replacement" | "traversal" | "layer", WithoutReplacement():
            if recursion_calls(proposal) <= MAX_RECURSION:
                value = rrs_without_replacement_acceptance(p, q, proposal.width)
        case "naive_tree", Iid():
            value = naive_tree_acceptance(p, q, proposal.width)
        case "k_seq", Iid():
            value = k_seq_acceptance(p, q, proposal.width)
        case "greedy", Mixed():  # residual tokens hit fixed candidates and the other draws
            hits = np.maximum(p - q, 0.0) * _iid_inclusion(q, proposal.width - 1)
            value = float(p[list(proposal.fixed)].sum() + np.minimum(p, q).sum() + hits.sum())
        case _:
            pass
    return value


def inclusion(proposal: Proposal, num_tokens: int) -> Vector | None:
    """Return P(token is among the candidates), or `None` if it is not known."""
    included: Vector | None = None
    match proposal:
        case Iid() | SharedClocks():
            included = _iid_inclusion(dense(proposal.law, num_tokens), proposal.width)
        case Mixed():
            included = _iid_inclusion(dense(proposal.law, num_tokens), proposal.width)
            included[list(proposal.fixed)] = 1.0
        case WithoutReplacement():
            q = dense(proposal.law, num_tokens)
            if proposal.width <= 2 or np.count_nonzero(q) <= MAX_RACES:
                included = distinct_inclusion(q, proposal.width)
        case Systematic():
            included = np.zeros(num_tokens)
            cells = proposal.cells
            for candidates, length in zip(cells.candidates, cells.lengths, strict=True):
                included[list(candidates)] += length
        case _:
            pass
    return included


def recursion_calls(proposal: Proposal) -> float:
    """Return an upper bound of the calls of the recursion over rejected tokens, if the candidates have one."""
    if not isinstance(proposal, WithoutReplacement):
        return 0.0
    return float(proposal.law.sparse().probs.numel()) ** (proposal.width - 1)


def _iid_inclusion(q: Vector, width: int) -> Vector:
    return 1.0 - (1.0 - q) ** width
