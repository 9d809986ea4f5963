"""Sampling schemes at a node: their optimum, and the acceptance of the registered rules in closed form.

p = target law, q = draft law, K = `width`. Acceptance is P(the emitted token is among the
candidates), whichever branch emits it.
"""

from typing import Final

import numpy as np
import torch

from monge.core.errors import LawError, OptionError
from monge.draft.tree.children import CHILDREN, way_of_drawing
from monge.laws.draws import RequestDraws
from monge.laws.law import DenseLaw
from monge.laws.proposal import (
    Deterministic,
    Iid,
    Mixed,
    Proposal,
    SharedClocks,
    WithoutReplacement,
)
from monge.oracle.exact_law import OracleError, exact_law
from monge.transport.bounds import (
    greedy_proposal,
    mixed_optimum,
    without_replacement_optimum,
)
from monge.transport.candidates import TransportProblem
from monge.transport.closed_forms import (
    k_seq_acceptance,
    match_probability,
    naive_tree_acceptance,
    recursive_rejection_acceptance,
    recursive_rejection_without_replacement_acceptance,
)
from monge.transport.laws import Vector, dense
from monge.transport.linear_program import solve
from monge.transport.race import distinct_inclusion

MAX_ENTRIES_SOLVED: Final = 20_000
"""Most tuples times tokens that the linear program is given: some seconds on one core."""

_OWN_NAMES: Final = frozenset({"iid", "without_replacement", "top", "greedy_plus_one", "mixed"})

MAX_RACES: Final = 1000
"""Most drafted tokens for the inclusion of three or more draws without replacement: megabytes of tables."""

MAX_RECURSION: Final = 100_000
"""Most calls of the recursion over rejected tokens: some seconds on one core."""

_OPTIMAL: Final = frozenset({"optimal", "layer"})  # at a single node, the inner rules of `layer`
"""Rules that attain the optimum of independent draws, with or without fixed candidates."""

_KNOWN: Final = _OPTIMAL | {
    *(
        "sample_and_match",
        "speculative_sampling",
        "block",
        "recursive_rejection",
        "recursive_rejection_without_replacement",
        "traversal",
    ),
    *("naive_tree", "k_seq", "greedy", "gumbel"),
}


def sampling_schemes(q: Vector, width: int) -> dict[str, Proposal]:
    """Return every way of drafting `width` candidates from q, by name.

    The names are `single` (one draw, for rules that take one candidate), `iid`,
    `without_replacement`, `greedy` (K - 1 top tokens and a draw), `mixed(d)` (d top tokens and K -
    d draws), `top`, and the other schemes that trees offer.

    Args:
        q: Draft law, checked.
        width: K.
    """
    law = DenseLaw(torch.from_numpy(q.copy()))
    schemes: dict[str, Proposal] = {
        "single": way_of_drawing("iid").propose(law, 1),
        "iid": way_of_drawing("iid").propose(law, width),
        "without_replacement": way_of_drawing("without_replacement").propose(law, width),
        "greedy": mixed_proposal(q, width - 1, width),
    }
    schemes |= {f"mixed({fixed})": mixed_proposal(q, fixed, width) for fixed in range(1, width - 1)}
    schemes["top"] = mixed_proposal(q, width, width)
    for way in CHILDREN:
        if (proposal := _children(way, law, width)) is not None:
            schemes[way] = proposal
    return schemes


def mixed_proposal(q: Vector, num_fixed: int, width: int) -> Proposal:
    """Return the `num_fixed` most probable tokens and `width - num_fixed` independent draws from the rest of q."""
    fixed, rest = greedy_proposal(q, num_fixed + 1)
    if rest is None or num_fixed == width:
        return Deterministic(fixed)
    law = DenseLaw(torch.from_numpy(rest))
    return Mixed(fixed, law, width - num_fixed) if fixed else Iid(law, width)


def optimum(p: Vector, proposal: Proposal) -> float | None:
    """Return the largest acceptance of a lossless rule.

    `None` if no closed form is known and the law is too large for the linear program.
    """
    if isinstance(proposal, Deterministic):
        return float(p[list(proposal.token_ids)].sum())
    if (law := proposal.draft_law) is None:
        return _solved(p, proposal)
    q, width = dense(law, p.size), len(proposal.draft_laws)
    if proposal.may_repeat:  # races on clocks of their own are independent draws
        return mixed_optimum(p, proposal.fixed_ids, q, width).acceptance
    return without_replacement_optimum(p, q, width).acceptance


def mixed_optima(p: Vector, q: Vector, width: int) -> list[float]:
    """Return the optimum with d deterministic candidates and K - d draws, for d = 0..K."""
    values = [optimum(p, mixed_proposal(q, fixed, width)) for fixed in range(width + 1)]
    return [value for value in values if value is not None]


def num_candidates(proposal: Proposal) -> int:
    """Return the number of candidates that are drawn, repeats counted."""
    return len(proposal.draw(RequestDraws(0)))


def _solved(p: Vector, proposal: Proposal) -> float | None:
    try:
        problem = TransportProblem.from_proposal(p, proposal)
    except LawError:  # a joint law that transport does not know is listed draw by draw
        try:
            drawn = exact_law(proposal.draw, max_runs=MAX_ENTRIES_SOLVED // p.size)
        except OracleError:
            return None
        problem = TransportProblem.from_joint_law(p, drawn)
    except OptionError:  # too long to list
        return None
    is_small = len(problem.candidates.tuples) * p.size <= MAX_ENTRIES_SOLVED
    return solve(problem).acceptance if is_small else None


def _children(way: str, law: DenseLaw, width: int) -> Proposal | None:
    """The proposal of a tree's sampling scheme, unless it has a name above or draws fewer candidates."""
    if way in _OWN_NAMES or way_of_drawing(way).min_width > width:
        return None
    try:
        proposal = way_of_drawing(way).propose(law, width)
    except (OptionError, LawError):  # not for this number of candidates, or needs an argument
        return None
    return proposal if num_candidates(proposal) >= min(width, law.sparse().probs.numel()) else None


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
    is_optimal = name in _OPTIMAL and proposal.draft_law is not None and proposal.may_repeat
    value = optimum(p, proposal) if is_optimal else _by_rule(name, p, proposal)
    return None if value is None else min(1.0, max(0.0, value))  # rounding of a sum of masses


def _by_rule(name: str, p: Vector, proposal: Proposal) -> float | None:
    width, fixed = len(proposal.draft_laws), list(proposal.fixed_ids)
    q = np.zeros(0) if (law := proposal.draft_law) is None else dense(law, p.size)
    value: float | None = None
    match name, proposal:
        case "gumbel", SharedClocks():
            value = match_probability(p, q, 1) if width == 1 else None
        case "sample_and_match" | "gumbel", _:  # candidates without the clocks are met by chance
            included = inclusion(proposal, p.size)
            value = None if included is None else float(p @ included)
        case "speculative_sampling" | "block", _ if width == 1:
            value = float(np.minimum(p, q).sum())
        case (
            "recursive_rejection_without_replacement" | "traversal" | "layer",
            WithoutReplacement(),
        ):
            if recursion_calls(proposal) <= MAX_RECURSION:
                value = recursive_rejection_without_replacement_acceptance(p, q, width)
        case (
            ("recursive_rejection" | "recursive_rejection_without_replacement" | "traversal"),
            _,
        ) if name == "recursive_rejection" or width == 1:
            points = np.zeros((len(fixed), p.size))
            points[np.arange(len(points)), fixed] = 1.0
            value = recursive_rejection_acceptance(p, [*points, *[q] * width])
        case "naive_tree", _:
            value = naive_tree_acceptance(p, q, width)
        case "k_seq", _:
            value = k_seq_acceptance(p, q, width)
        case "greedy", _:  # residual tokens hit fixed candidates and the other draws
            hits = np.maximum(p - q, 0.0) * _iid_inclusion(q, width - 1)
            value = float(p[fixed].sum() + np.minimum(p, q).sum() + hits.sum())
        case _:
            pass
    return value


def inclusion(proposal: Proposal, num_tokens: int) -> Vector | None:
    """Return P(token is among the candidates), or `None` if it is not known."""
    if (law := proposal.draft_law) is None:
        return None
    q, width = dense(law, num_tokens), len(proposal.draft_laws)
    if not proposal.may_repeat:
        is_short = width <= 2 or np.count_nonzero(q) <= MAX_RACES
        return distinct_inclusion(q, width) if is_short else None
    included = _iid_inclusion(q, width)
    included[list(proposal.fixed_ids)] = 1.0
    return included


def recursion_calls(proposal: Proposal) -> float:
    """Return an upper bound of the calls of the recursion over rejected tokens, if the candidates have this recursion."""
    if not isinstance(proposal, WithoutReplacement):
        return 0.0
    return float(proposal.law.sparse().probs.numel()) ** (proposal.width - 1)


def _iid_inclusion(q: Vector, width: int) -> Vector:
    return 1.0 - (1.0 - q) ** width
