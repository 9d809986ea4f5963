"""Ways of drafting K candidates at one node, and the largest acceptance that each of them allows.

p = target law, q = draft law, K = `width`.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from monge.core.clocks import SharedClocks
from monge.core.draws import RequestDraws
from monge.core.errors import LawError, OptionError
from monge.core.law import DenseLaw
from monge.core.proposal import Deterministic, HubPairs, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.systematic import Systematic
from monge.draft.tree.children import CHILDREN, children_of, way_of_drawing
from monge.testing.oracle import OracleError, exact_law
from monge.transport.bounds import (
    greedy_proposal,
    iid_optimum,
    mixed_optimum,
    without_replacement_optimum,
)
from monge.transport.laws import dense
from monge.transport.linear_program import solve
from monge.transport.problem import TransportProblem
from monge.transport.systematic import earliest_deadline_first

Vector = Float64[np.ndarray, " vocab"]

MAX_ENTRIES_SOLVED: Final = 20_000
"""Most tuples times tokens that the linear program is given: some seconds on one core."""

_OWN_NAMES: Final = frozenset({"iid", "without_replacement", "top", "greedy_plus_one", "mixed"})


def sampling_schemes(q: Vector, width: int) -> dict[str, Proposal]:
    """Return every way of drafting `width` candidates from q, by name.

    The names are `single` (one draw, for rules that take one candidate), `iid`,
    `without_replacement`, `greedy` (K - 1 top tokens and one draw), `mixed(d)` (d top tokens and
    K - d draws), `top`, and the other schemes that trees offer.

    Args:
        q: Draft law, checked.
        width: K.
    """
    law = DenseLaw(torch.from_numpy(q.copy()))
    schemes: dict[str, Proposal] = {
        "single": Iid(law, 1),
        "iid": Iid(law, width),
        "without_replacement": WithoutReplacement(law, width),
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
    best: float | None
    match proposal:
        case Deterministic():
            best = float(p[list(proposal.token_ids)].sum())
        case Iid() | SharedClocks():  # races on clocks of their own are independent draws
            best = iid_optimum(p, dense(proposal.law, p.size), proposal.width).acceptance
        case WithoutReplacement():
            q = dense(proposal.law, p.size)
            best = without_replacement_optimum(p, q, proposal.width).acceptance
        case Mixed():
            q = dense(proposal.law, p.size)
            best = mixed_optimum(p, proposal.fixed, q, proposal.width).acceptance
        case Systematic():
            tokens = {token for candidates in proposal.cells.candidates for token in candidates}
            sizes = {token: float(p[token]) for token in tokens}
            best = earliest_deadline_first(proposal.cells, sizes).accepted
        case HubPairs():  # the hub and one draw from the rest, in an order that needs no look
            rest = proposal.law.without(proposal.hub)
            hub = (proposal.hub,)
            best = optimum(p, Deterministic(hub) if rest is None else Mixed(hub, rest, 1))
        case _:
            best = _solved(p, proposal)
    return best


def mixed_optima(p: Vector, q: Vector, width: int) -> list[float]:
    """Return the optimum with d deterministic candidates and K - d draws, for d = 0..K."""
    values = [optimum(p, mixed_proposal(q, fixed, width)) for fixed in range(width + 1)]
    return [value for value in values if value is not None]


def num_candidates(proposal: Proposal) -> int:
    """Return the number of candidates of one drawing, repeats counted."""
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
        proposal = children_of(way, law, width)
    except (OptionError, LawError):  # not for this number of candidates, or needs an argument
        return None
    return proposal if num_candidates(proposal) >= min(width, law.sparse().probs.numel()) else None
