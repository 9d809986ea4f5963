"""Recursive rejection sampling with candidates drawn without replacement."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import Excess
from monge.laws.proposal import Deterministic, Iid, Proposal, WithoutReplacement
from monge.verify.flow import Emission, Flow, FlowRule, walked
from monge.verify.functional.where import share
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk, without_replacement
from monge.verify.recursive_rejection import emitted
from monge.verify.speculative_sampling import SpeculativeSampling
from monge.verify.whole_tree import offered


@dataclass(frozen=True, slots=True)
class RecursiveRejectionWithoutReplacement(FlowRule):
    """Recursive rejection that tests each candidate against its law given the candidates before it.

    Law:
        The emitted token follows p for candidates drawn without replacement *in drawing order*
        (sorting them by q or by id breaks it), for deterministic candidates, and for independent
        draws: these, repeats dropped, are draws without replacement whose number does not depend on
        the tokens still to come.

    Rule:
        `P = p, Q = q`; for X in drawing order: accept with probability `min(1, P_X / Q_X)`, else `P
        = (P - Q)_+` and `Q` without X, both renormalised; when none is accepted emit `y ~ P`.
        Acceptance is 1 where the candidates cover the support of p.

    Cost:
        O(K vocab) for K candidates in the worst case.

    Reference:
        RSD-C and RSD-S (Jeon et al., arXiv 2402.14160); MCSD (Yang et al., arXiv 2401.06706);
        Sequoia (Chen et al., arXiv 2402.12374, Algorithm 2; its uniform draws after the support is
        exhausted do not occur here, because `WithoutReplacement` then stops).
    """

    accepts = frozenset[type[Proposal]]({WithoutReplacement, Iid, Deterministic})
    programs = Programs(
        by_kind={
            WithoutReplacement: without_replacement,
            Iid: without_replacement,
            Deterministic: walk,
        }
    )

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        distinct = tuple(dict.fromkeys(candidates))
        return emitted(target_law, proposal.draft_law, distinct, draws, replacement=False)

    def flow(self, problem: NodeProblem) -> Flow | Emission:
        """The flow of `emit`. The residual depends on rejected tokens, so y has a closed form for a single candidate only."""
        proposal = problem.proposal
        if proposal.draft_law is None:
            return walked(problem)
        if len(proposal.draft_laws) == 1:
            return SpeculativeSampling().flow(problem)
        p, scale, reach = problem.target_law, problem.scale, 1.0
        probs: dict[int, float] = {}
        for x, q in offered(proposal, problem.candidates, p):
            accept = min(1.0, scale * p.prob(x) / q.prob(x))
            probs[x] = reach * accept
            reach *= 1.0 - accept
            rest = Excess(scale, p, q)
            scale, p = share(rest.mass, scale), rest.law
        return Emission(accept_probs=probs, leftover=reach * scale, leftover_law=p)
