"""Ways of drafting K candidates at one node, and the largest acceptance that each of them allows.

p = target law, q = draft law, K = `width`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from monge.core.clocks import SharedClocks
from monge.core.draws import RequestDraws
from monge.core.errors import LawError, OptionError
from monge.core.hub_pairs import HubPairs
from monge.core.law import DenseLaw
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingScheme:
    """A named way of drafting.

    Args:
        name: `single` (one draw, for rules that take one candidate), `iid`, `without_replacement`,
            `greedy` (K - 1 top tokens and one draw), `mixed(d)` (d top tokens and K - d draws),
            `top`, or another way that trees offer by name.
        proposal: What it draws.
    """

    name: str
    proposal: Proposal


def sampling_schemes(q: Vector, width: int) -> tuple[SamplingScheme, ...]:
    """Every way of drafting `width` candidates from q.

    Args:
        q: Draft law, checked.
        width: K.
    """
    law = DenseLaw(torch.from_numpy(q.copy()))
    named: dict[str, Proposal] = {
        "single": Iid(law, 1),
        "iid": Iid(law, width),
        "without_replacement": WithoutReplacement(law, width),
        "greedy": mixed_proposal(q, width - 1, width),
    }
    named |= {f"mixed({fixed})": mixed_proposal(q, fixed, width) for fixed in range(1, width - 1)}
    named["top"] = mixed_proposal(q, width, width)
    for way in CHILDREN:
        proposal = _children(way, law, width)
        if proposal is not None:
            named[way] = proposal
    return tuple(SamplingScheme(name=name, proposal=proposal) for name, proposal in named.items())


def mixed_proposal(q: Vector, num_fixed: int, width: int) -> Proposal:
    """The `num_fixed` most probable tokens and `width - num_fixed` independent draws from the rest of q."""
    fixed, rest = greedy_proposal(q, num_fixed + 1)
    if rest is None or num_fixed == width:
        return Deterministic(fixed)
    law = DenseLaw(torch.from_numpy(rest))
    return Mixed(fixed, law, width - num_fixed) if fixed else Iid(law, width)


def optimum(p: Vector, proposal: Proposal) -> float | None:
    """The largest acceptance of a lossless rule.

    `None` where no closed form is known and the law is too large to solve.
    """
    match proposal:
        case Deterministic():
            return float(p[list(proposal.token_ids)].sum())
        case Iid() | SharedClocks():  # races on clocks of their own are independent draws
            return iid_optimum(p, dense(proposal.law, p.size), proposal.width).acceptance
        case WithoutReplacement():
            return without_replacement_optimum(
                p, dense(proposal.law, p.size), proposal.width
            ).acceptance
        case Mixed():
            return mixed_optimum(
                p, proposal.fixed, dense(proposal.law, p.size), proposal.width
            ).acceptance
        case _:
            return _other_optimum(p, proposal)


def mixed_optima(p: Vector, q: Vector, width: int) -> list[float]:
    """The optimum with d deterministic candidates and K - d draws, for d = 0..K."""
    values = [optimum(p, mixed_proposal(q, fixed, width)) for fixed in range(width + 1)]
    return [value for value in values if value is not None]


def num_candidates(proposal: Proposal) -> int:
    """Candidates of one drawing, repeats counted."""
    return len(proposal.draw(RequestDraws(0)))


def _other_optimum(p: Vector, proposal: Proposal) -> float | None:
    if isinstance(proposal, Systematic):
        tokens = {token for candidate_ids in proposal.cells.candidates for token in candidate_ids}
        return earliest_deadline_first(
            proposal.cells, {token: float(p[token]) for token in tokens}
        ).accepted
    # The hub and one draw from the rest, in an order that an optimal rule need not look at.
    if isinstance(proposal, HubPairs):
        rest = proposal.law.without(proposal.hub)
        return optimum(
            p, Deterministic((proposal.hub,)) if rest is None else Mixed((proposal.hub,), rest, 1)
        )
    return _solved(p, proposal)


def _solved(p: Vector, proposal: Proposal) -> float | None:
    try:
        problem = TransportProblem.from_proposal(p, proposal)
    except LawError:  # a joint law that transport does not know is listed draw by draw
        try:
            problem = TransportProblem.from_joint_law(
                p, exact_law(proposal.draw, max_runs=MAX_ENTRIES_SOLVED // p.size)
            )
        except OracleError:
            return None
    except OptionError:  # too long to list
        return None
    return (
        solve(problem).acceptance
        if len(problem.candidates.tuples) * p.size <= MAX_ENTRIES_SOLVED
        else None
    )


def _children(way: str, law: DenseLaw, width: int) -> Proposal | None:
    """Return the proposal of a tree's sampling scheme, unless it has a name above or draws fewer candidates."""
    if way in _OWN_NAMES or way_of_drawing(way).min_width > width:
        return None
    try:
        proposal = children_of(way, law, width)
    # A way that is not for this number of candidates, or needs an argument.
    except (OptionError, LawError):
        return None
    return proposal if num_candidates(proposal) >= min(width, law.sparse().probs.numel()) else None
