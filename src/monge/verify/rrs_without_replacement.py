"""Recursive rejection sampling with candidates drawn without replacement."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.proposal import Deterministic, Iid, Proposal, WithoutReplacement
from monge.verify.base import NodeRule


@dataclass(frozen=True, slots=True)
class RrsWithoutReplacement(NodeRule):
    """Recursive rejection where each candidate is tested against the law it had given the ones before it.

    Law:
        The emitted token follows p for candidates drawn without replacement *in drawing order* (sorting them by q or by id
        breaks it), for deterministic candidates, and for independent draws: these, repeats dropped, are draws without
        replacement whose number does not depend on the tokens still to come.

    Rule:
        `P = p, Q = q`; for X in drawing order: accept with probability `min(1, P_X / Q_X)`, else `P = (P - Q)_+` and `Q`
        without X, both renormalised; when none is accepted emit `y ~ P`.

    Cost:
        O(K vocab) for K candidates in the worst case.

    Reference:
        RSD-C and RSD-S (Jeon et al., arXiv 2402.14160); MCSD (Yang et al., arXiv 2401.06706); Sequoia (Chen et al.,
        arXiv 2402.12374, Algorithm 2; its uniform draws after the support is exhausted do not occur here, because
        `WithoutReplacement` then stops).
    """

    accepts = frozenset[type[Proposal]]({WithoutReplacement, Iid, Deterministic})

    def emit(self, target_law: Law, proposal: Proposal, offers: Sequence[int], draws: Draws) -> int:
        q = proposal.law if isinstance(proposal, WithoutReplacement | Iid) else None
        p = target_law
        for x in dict.fromkeys(offers):
            # Without a draft law q is the point mass at x: the ratio is p_x, and the residual is p without x.
            accept = p.prob(x) if q is None else min(1.0, p.prob(x) / q.prob(x))
            if draws.bernoulli(accept):
                return x
            rest = p.without(x) if q is None else p.excess_over(q)
            if rest is not None:  # nothing is left only where x was certain to be accepted
                p = rest
            if q is not None:
                q = q.without(x)  # None only after the last token of the support, which is also the last offer
        return draws.categorical(p)
