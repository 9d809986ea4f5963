"""Wrong decisions at one node, each a mistake that was really made or that is easily made.

Every law test must reject them.

p = target law, q = draft law, K = number of candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from monge.laws.draws import Draws
from monge.laws.law import Law, SparseLaw, residual, tempered
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.transport.canonical import PairSelection, truncated_program
from monge.verify.base import NodeRule
from monge.verify.greedy import Greedy
from monge.verify.k_seq import divisors
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.speculative_sampling import SpeculativeSampling
from tests.kit.banks import OfIid, law_of, masses_of

Make = Callable[[Law], Proposal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rule, how its candidates are really drawn, and how they are declared.

    Args:
        rule: What decides.
        drawn: Draft law to the way of drawing.
        declared: Draft law to what the rule is told; `None` where that is the truth.
    """

    rule: NodeRule
    drawn: Make
    declared: Make | None = None

    def emit(self, p: Law, q: Law, draws: Draws) -> int:
        """Draw the candidates, and decide."""
        drawn = self.drawn(q)
        declared = drawn if self.declared is None else self.declared(q)
        return self.rule.emit(p, declared, drawn.draw(draws), draws)


@dataclass(frozen=True, slots=True)
class Reordered(Proposal):
    """Draws without replacement that are sorted by token afterwards."""

    law: Law

    def draw(self, draws: Draws) -> tuple[int, ...]:
        return tuple(sorted(WithoutReplacement(self.law, 2).draw(draws)))


@dataclass(frozen=True, slots=True)
class OtherTarget(NodeRule):
    """The target's law at another temperature than the one that is asked for."""

    accepts = frozenset[type[Proposal]]({Iid})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        return RecursiveRejection().emit(tempered(target_law, 0.7), proposal, candidates, draws)


@dataclass(frozen=True, slots=True)
class EpsilonInResidual(OfIid):
    """A small constant added to every entry of the residual."""

    def decide(self, target, draft, candidates, draws):
        p, q = masses_of(target), masses_of(draft)
        for x in candidates:
            if draws.bernoulli(min(1.0, p[x] / q[x])):
                return x
            p = np.maximum(p - q, 0.0) + 1e-4
            p = p / p.sum()
        return draws.categorical(law_of(p))


@dataclass(frozen=True, slots=True)
class SmallResidualDropped(OfIid):
    """A residual of less than 0.01 taken for rounding, and p emitted instead.

    Wrong where p almost equals q.
    """

    def decide(self, target, draft, candidates, draws):
        p, q = masses_of(target), masses_of(draft)
        (x,) = candidates
        if draws.bernoulli(min(1.0, p[x] / q[x])):
            return x
        rest = np.maximum(p - q, 0.0)
        return draws.categorical(target if rest.sum() < 0.01 else law_of(rest))


@dataclass(frozen=True, slots=True)
class KSeqRounded(OfIid):
    """K-SEQ with rho rounded to one decimal.

    Args:
        up: Rounded up, with the gamma of the exact rho; otherwise down, the negative part of the
            residual cut off.
    """

    up: bool

    def decide(self, target, draft, candidates, draws):
        exact, gamma = divisors(target, draft, len(candidates))
        rho = (np.ceil(10 * exact) if self.up else np.floor(10 * exact)) / 10
        p, q = masses_of(target), masses_of(draft)
        for x in candidates:
            if draws.bernoulli(min(1.0, p[x] / (rho * q[x]))):
                return x
        if not self.up:
            beta = np.minimum(p / rho, q).sum()
            gamma = (1.0 - (1.0 - beta) ** len(candidates)) / beta
        rest = np.maximum(p - gamma * np.minimum(p / rho, q), 0.0)
        return draws.categorical(law_of_rest(rest, target))


@dataclass(frozen=True, slots=True)
class KSeqWithoutRepeats(OfIid):
    """K-SEQ that forgets repeats: K is the number of distinct candidates."""

    def decide(self, target, draft, candidates, draws):
        distinct = tuple(dict.fromkeys(candidates))
        p, q = target, draft
        rho, gamma = divisors(p, q, len(distinct))
        for x in distinct:
            if draws.bernoulli(min(1.0, p.prob(x) / (rho * q.prob(x)))):
                return x
        masses, drafts = masses_of(p), masses_of(q)
        rest = np.maximum(masses - gamma * np.minimum(masses / rho, drafts), 0.0)
        return draws.categorical(law_of_rest(rest, p))


@dataclass(frozen=True, slots=True)
class PerturbedProgram(OfIid):
    """The canonical rule with a program that was solved to 1e-3 only.

    Args:
        recomputed: Whether the law of the selected candidate is computed from the choices that are
            carried out; otherwise it is the one that the solver reports, of the choices before they
            were disturbed.
    """

    recomputed: bool

    def decide(self, target, draft, candidates, draws):
        p, q = masses_of(target), masses_of(draft)
        solved = truncated_program(p, q, q, num_leading=p.size)
        carried_out = replace(solved, leading_choice=0.999 * solved.leading_choice + 0.0005)
        first, second = candidates
        z = first if draws.bernoulli(carried_out.first_prob(first, second)) else second
        x = _selectedlaw_of(carried_out, q) if self.recomputed else solved.winner_law
        if draws.bernoulli(min(1.0, float(p[z] / x[z]))):
            return z
        return draws.categorical(law_of_rest(np.maximum(p - x, 0.0), target))


@dataclass(frozen=True, slots=True)
class CertainShortcut(NodeRule):
    """SpecHub's released code: a fixed candidate is accepted at once where the target is almost certain of it."""

    accepts = frozenset[type[Proposal]]({Mixed})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        assert isinstance(proposal, Mixed)
        if target_law.prob(proposal.fixed[0]) > 1.0 - 1e-3:
            return proposal.fixed[0]
        return Greedy().emit(target_law, proposal, candidates, draws)


@dataclass(frozen=True, slots=True)
class SpecTrGbv(OfIid):
    """The released rule of SpecTr-GBV (arXiv 2604.25925) for one token.

    Right for one candidate only.

    With r = min(q / p, 1), accept in order with probability `p (1 - (1 - r)^K) / (1 - (1 - q)^K)`,
    at most one; otherwise emit from `p (1 - r^K)`.
    """

    def decide(self, target, draft, candidates, draws):
        p, q, count = masses_of(target), masses_of(draft), len(candidates)
        r = np.minimum(q / p, 1.0)
        accept = np.minimum(p * (1.0 - (1.0 - r) ** count) / (1.0 - (1.0 - q) ** count), 1.0)
        for x in candidates:
            if draws.bernoulli(float(accept[x])):
                return x
        left = p * (1.0 - r**count)
        return draws.categorical(law_of_rest(left, target))


@dataclass(frozen=True, slots=True)
class RepeatsDroppedProperly(OfIid):
    """Not wrong: independent draws, repeats dropped, are draws without replacement."""

    def decide(self, target, draft, candidates, draws):
        distinct = tuple(dict.fromkeys(candidates))
        return RecursiveRejectionWithoutReplacement().emit(
            target, WithoutReplacement(draft, len(distinct)), distinct, draws
        )


@dataclass(frozen=True, slots=True)
class CoinInResidual(OfIid):
    """One uniform u decides the acceptance, u < a, and then picks the correction token."""

    def decide(self, target, draft, candidates, draws):
        p, q, (x,) = target, draft, candidates
        accept = min(1.0, p.prob(x) / q.prob(x))
        return (
            x
            if draws.bernoulli(accept)
            else draws.categorical(between(residual(p, q), accept, 1.0))
        )


@dataclass(frozen=True, slots=True)
class DraftNoiseInRecovery(OfIid):
    """The uniform that drew the candidate from q picks the correction token from the residual."""

    def decide(self, target, draft, candidates, draws):
        p, q, (x,) = target, draft, candidates
        if draws.bernoulli(min(1.0, p.prob(x) / q.prob(x))):
            return x
        below = float(masses_of(q)[:x].sum())
        return draws.categorical(between(residual(p, q), below, below + q.prob(x)))


def law_of_rest(rest: Float64[np.ndarray, " vocab"], p: Law) -> Law:
    """The law of what a rule has left to emit; p where nothing is left.

    Nothing is left where every candidate is accepted. How a solver rounds decides whether such a
    rule is asked at all.
    """
    return law_of(rest) if rest.any() else p


def between(law: Law, low: float, high: float) -> SparseLaw:
    """The law of `law.quantile(u)` for a uniform that is known to lie between two positions."""
    part = law.sparse()
    upper = part.probs.cumsum(0)
    shared = (upper.clamp(max=high) - (upper - part.probs).clamp(min=low)).clamp(min=0.0)
    kept = shared > 0.0
    return SparseLaw(part.token_ids[kept], shared[kept] / shared.sum())


def processed(law: Law) -> SparseLaw:
    """A draft law after a temperature and a top-k."""
    return tempered(truncated(law), 0.7)


def truncated(law: Law) -> SparseLaw:
    """The law of the top two tokens."""
    masses = dict(law.top_masses(2))
    probs = torch.tensor([masses[token] for token in sorted(masses)], dtype=torch.float64)
    return SparseLaw(torch.tensor(sorted(masses)), probs / probs.sum())


def pair(law: Law) -> Proposal:
    """Two independent draws."""
    return Iid(law, 2)


KNOWN_BAD_NODES: Final[Mapping[str, Mutant]] = MappingProxyType(
    {
        "drawn at another temperature than declared": Mutant(
            rule=RecursiveRejection(), drawn=lambda q: pair(tempered(q, 0.7)), declared=pair
        ),
        "target at another temperature than asked for": Mutant(rule=OtherTarget(), drawn=pair),
        "sorted by token after drawing without replacement": Mutant(
            rule=RecursiveRejectionWithoutReplacement(),
            drawn=Reordered,
            declared=lambda q: WithoutReplacement(q, 2),
        ),
        "repeats dropped, k_seq": Mutant(rule=KSeqWithoutRepeats(), drawn=pair),
        "epsilon 1e-4 in the residual": Mutant(rule=EpsilonInResidual(), drawn=pair),
        "k_seq with rho rounded down": Mutant(rule=KSeqRounded(up=False), drawn=pair),
        "k_seq with rho rounded up and a stale gamma": Mutant(
            rule=KSeqRounded(up=True), drawn=pair
        ),
        "law of the selected candidate from the solver": Mutant(
            rule=PerturbedProgram(recomputed=False), drawn=pair
        ),
        "SpecTr-GBV, two candidates": Mutant(rule=SpecTrGbv(), drawn=pair),
        "SpecTr-GBV, three candidates": Mutant(rule=SpecTrGbv(), drawn=lambda q: Iid(q, 3)),
        "acceptance uniform used again in the residual": Mutant(
            rule=CoinInResidual(), drawn=lambda q: Iid(q, 1)
        ),
        "draft noise used again for recovery": Mutant(
            rule=DraftNoiseInRecovery(), drawn=lambda q: Iid(q, 1)
        ),
        "raw q declared for a processed draft": Mutant(
            rule=SpeculativeSampling(),
            drawn=lambda q: Iid(processed(q), 1),
            declared=lambda q: Iid(q, 1),
        ),
        "softmax q declared for a top-1 draft": Mutant(
            rule=SpeculativeSampling(),
            drawn=lambda q: Deterministic(q.top(1)),
            declared=lambda q: Iid(q, 1),
        ),
        "drawn from the top two, declared whole": Mutant(
            rule=RecursiveRejection(), drawn=lambda q: pair(truncated(q)), declared=pair
        ),
    }
)
"""To be refused on a bank of ordinary laws."""

HARMLESS_NODES: Final[Mapping[str, Mutant]] = MappingProxyType(
    {
        "repeats dropped, verified as draws without replacement": Mutant(
            rule=RepeatsDroppedProperly(), drawn=pair
        ),
        "a program solved badly, its law recomputed": Mutant(
            rule=PerturbedProgram(recomputed=True), drawn=pair
        ),
        "SpecTr-GBV, one candidate": Mutant(rule=SpecTrGbv(), drawn=lambda q: Iid(q, 1)),
        "processed draft, declared so": Mutant(
            rule=SpeculativeSampling(), drawn=lambda q: Iid(processed(q), 1)
        ),
        "top-1 draft, declared so": Mutant(
            rule=SpeculativeSampling(), drawn=lambda q: Deterministic(q.top(1))
        ),
        "drawn from the top two, and declared so": Mutant(
            rule=RecursiveRejection(), drawn=lambda q: pair(truncated(q))
        ),
    }
)
"""Their neighbours, which look as suspicious and are exact."""


def _selectedlaw_of(
    selection: PairSelection, q: Float64[np.ndarray, " vocab"]
) -> Float64[np.ndarray, " vocab"]:
    x = np.zeros(q.size)
    for first in range(q.size):
        for second in range(q.size):
            stays = selection.first_prob(first, second)
            x[first] += q[first] * q[second] * stays
            x[second] += q[first] * q[second] * (1.0 - stays)
    return x
