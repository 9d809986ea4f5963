"""Acceptance of the registered rules in closed form, for vocabularies of any size.

p = target law, q = draft law. Acceptance is P(the emitted token is among the candidates), whichever
branch emits it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.acceptance.sampling_schemes import optimum
from monge.core.clocks import SharedClocks
from monge.core.hub_pairs import HubPairs
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.systematic import Systematic
from monge.transport.closed_forms import (
    k_seq_acceptance,
    naive_tree_acceptance,
    rrs_acceptance,
    rrs_without_replacement_acceptance,
)
from monge.transport.laws import dense
from monge.transport.race import FIRST_TIME, LAST_WAIT, log_step
from monge.transport.shared_noise import match_probability

Vector = Float64[np.ndarray, " vocab"]
ClosedForm = Callable[[Vector, Proposal], float | None]

MAX_RACES: Final = 1000
"""Most drafted tokens for which the inclusion of more than two draws without replacement is computed: megabytes of tables."""

MAX_RECURSION: Final = 100_000
"""Most calls of the recursion over rejected tokens: some seconds on one core."""


def closed_form(name: str, p: Vector, proposal: Proposal) -> float | None:
    """Acceptance of a registered verifier, or `None` where no closed form is known (or it would take too long).

    Args:
        name: Its name.
        p: Target law.
        proposal: Candidates for which the rule is exact.
    """
    form = CLOSED_FORMS.get(name)
    if form is None:
        return None
    if isinstance(proposal, Deterministic):  # these rules walk the target where nothing is drawn
        return float(p[list(proposal.token_ids)].sum())
    value = form(p, proposal)
    return None if value is None else min(1.0, max(0.0, value))  # rounding of a sum of masses


def inclusion(proposal: Proposal, num_tokens: int) -> Vector | None:
    """P(token is among the candidates)."""
    match proposal:
        case Iid() | SharedClocks():
            return _iid_inclusion(dense(proposal.law, num_tokens), proposal.width)
        case Mixed():
            included = _iid_inclusion(dense(proposal.law, num_tokens), proposal.width)
            included[list(proposal.fixed)] = 1.0
            return included
        case WithoutReplacement():
            return _distinct_inclusion(dense(proposal.law, num_tokens), proposal.width)
        case Systematic():
            included = np.zeros(num_tokens)
            for candidates, length in zip(
                proposal.cells.candidates, proposal.cells.lengths, strict=True
            ):
                included[list(candidates)] += length
            return included
        case _:
            return None


def recursion_calls(proposal: Proposal) -> float:
    """Calls that the recursion over rejected tokens makes at most.

    Its cost, where the candidates have one.
    """
    if not isinstance(proposal, WithoutReplacement):
        return 0.0
    return float(proposal.law.sparse().probs.numel()) ** (proposal.width - 1)


def _target_walk(p: Vector, proposal: Proposal) -> float | None:
    included = inclusion(proposal, p.size)
    return None if included is None else float(p @ included)


def _single(p: Vector, proposal: Proposal) -> float | None:
    if isinstance(proposal, Iid) and proposal.width == 1:
        return float(np.minimum(p, dense(proposal.law, p.size)).sum())
    return None


def _rrs(p: Vector, proposal: Proposal) -> float | None:
    if not isinstance(proposal, Iid | Mixed):
        return None
    laws = [dense(proposal.law, p.size)] * proposal.width
    if isinstance(proposal, Mixed):
        laws = [*(_point_mass(token, p.size) for token in proposal.fixed), *laws]
    return rrs_acceptance(p, laws)


def _distinct_rrs(p: Vector, proposal: Proposal) -> float | None:
    """Recursive rejection without replacement.

    A leaf-to-root traversal of one level is the same rule.
    """
    if isinstance(proposal, WithoutReplacement):
        if recursion_calls(proposal) > MAX_RECURSION:
            return None
        return rrs_without_replacement_acceptance(p, dense(proposal.law, p.size), proposal.width)
    is_one_draw = isinstance(proposal, Iid | Mixed) and proposal.width == 1
    return _rrs(p, proposal) if is_one_draw else None


def _greedy(p: Vector, proposal: Proposal) -> float | None:
    """p(T) + sum of min(p, q') + residual tokens that hit one of the other draws."""
    if not isinstance(proposal, Mixed):
        return None
    q = dense(proposal.law, p.size)
    hits = np.maximum(p - q, 0.0) * _iid_inclusion(q, proposal.width - 1)
    return float(p[list(proposal.fixed)].sum() + np.minimum(p, q).sum() + hits.sum())


def _gumbel(p: Vector, proposal: Proposal) -> float | None:
    """One race against one; candidates that do not share the clocks are met by chance, as on the target walk."""
    if not isinstance(proposal, SharedClocks):
        return _target_walk(p, proposal)
    return match_probability(p, dense(proposal.law, p.size), 1) if proposal.width == 1 else None


def _layer(p: Vector, proposal: Proposal) -> float | None:
    """At a single node the lifted rule is the inner one: the best known for the way of drawing."""
    if isinstance(proposal, WithoutReplacement):
        return _distinct_rrs(p, proposal)
    return _optimum_of(Iid, Mixed, HubPairs, Systematic)(p, proposal)


def _optimum_of(*kinds: type[Proposal]) -> ClosedForm:
    """Acceptance of a rule that attains the optimum of these proposals."""
    return lambda p, proposal: optimum(p, proposal) if isinstance(proposal, kinds) else None


def _of_iid(form: Callable[[Vector, Vector, int], float]) -> ClosedForm:
    """A closed form of independent draws from q."""

    def value(p: Vector, proposal: Proposal) -> float | None:
        if not isinstance(proposal, Iid):
            return None
        return form(p, dense(proposal.law, p.size), proposal.width)

    return value


CLOSED_FORMS: Final[Mapping[str, ClosedForm]] = MappingProxyType(
    {
        "target_walk": _target_walk,
        "single_draft": _single,
        "block": _single,
        "rrs": _rrs,
        "rrs_without_replacement": _distinct_rrs,
        "traversal": _distinct_rrs,
        "naive_tree": _of_iid(naive_tree_acceptance),
        "k_seq": _of_iid(k_seq_acceptance),
        "greedy": _greedy,
        "spechub": _optimum_of(HubPairs),
        "systematic": _optimum_of(Systematic),
        "gumbel": _gumbel,
        "layer": _layer,
        "optimal": _optimum_of(Iid, Mixed),
    }
)
"""By name of the verifier; each answers `None` for candidates whose closed form is not known."""


def _iid_inclusion(q: Vector, width: int) -> Vector:
    return 1.0 - (1.0 - q) ** width


def _distinct_inclusion(q: Vector, width: int) -> Vector | None:
    tokens = np.flatnonzero(q)
    included = np.zeros(q.size)
    if width >= tokens.size:
        included[tokens] = 1.0
    elif width == 1:
        included[tokens] = q[tokens]
    elif width == 2:
        odds = q[tokens] / (1.0 - q[tokens])
        included[tokens] = q[tokens] * (1.0 + odds.sum() - odds)
    elif tokens.size <= MAX_RACES:
        included[tokens] = _race_inclusion(q[tokens], width)
    else:
        return None
    return included


def _race_inclusion(q: Vector, width: int) -> Vector:
    """P(fewer than K of the other clocks ring before clock i), by quadrature in log time (see `transport/race.py`)."""
    step = log_step(width)
    times = np.exp(np.arange(np.log(FIRST_TIME), np.log(LAST_WAIT / q.min()) + step, step))
    rings = -np.expm1(-q[:, None] * times)  # [tokens, times]
    # How many of the tokens seen so far rang, K or more left out.
    first = np.zeros((width, times.size))
    first[0] = 1.0
    behind = [first]
    for ring in rings[:0:-1]:
        behind.append(_one_more(behind[-1], ring))
    included = np.zeros(q.size)
    for token, (rate, ring) in enumerate(zip(q, rings, strict=True)):
        at_most = behind.pop().cumsum(axis=0)
        fewer = (first * at_most[::-1]).sum(axis=0)  # at most K - 1 together
        included[token] = step * float((rate * times * np.exp(-rate * times)) @ fewer)
        first = _one_more(first, ring)
    return included


def _one_more(
    counts: Float64[np.ndarray, "width times"], ring: Float64[np.ndarray, " times"]
) -> np.ndarray:
    moved = counts * ring
    more = counts - moved
    more[1:] += moved[:-1]
    return more


def _point_mass(token: int, num_tokens: int) -> Vector:
    law = np.zeros(num_tokens)
    law[token] = 1.0
    return law
