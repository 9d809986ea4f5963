"""Sample and match: draw from p and follow the child if it is there."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.proposal import PROPOSALS, Deterministic, Proposal
from monge.verify.flow import Emission, Flow, FlowRule, walked
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk


@dataclass(frozen=True, slots=True)
class SampleAndMatch(FlowRule):
    """Draw the token from the target law; keep it as accepted if it happens to be a candidate.

    Law:
        The emitted token is a draw from p that never looks at the candidates, so the output law is
        p for any candidates of any origin: deterministic, sampled, pruned, anticipating.

    Rule:
        `y ~ p`; descend if y is a candidate. Acceptance is `sum over candidates of p`: the optimum
        for a deterministic set, and for sampled candidates `sum_i p_i P(i is offered)`, which
        throws the coupling with q away.

    Cost:
        One draw from p a node.

    Reference:
        "Naive sampling" of SpecInfer (Miao et al., arXiv 2305.09781, section 4.3); the rule of
        EAGLE-2 (arXiv 2406.16858) for its deterministic trees, where zeroing and renormalising
        after each rejected child is the same draw in another order.
    """

    accepts = frozenset[type[Proposal]](PROPOSALS)
    programs = Programs(by_kind=dict.fromkeys(accepts, walk))
    # Of the others, drawing them uses up random numbers.
    invariant_for = frozenset[type[Proposal]]({Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        return draws.categorical(target_law)

    def flow(self, problem: NodeProblem) -> Flow | Emission:
        """`s p` of every candidate. The leftover law is p without the candidates."""
        if isinstance(problem.proposal, Deterministic):
            return walked(problem)
        p, scale = problem.target_law, problem.scale
        probs = {token: scale * p.prob(token) for token in problem.candidates}
        rest: Law | None = p
        for token in probs:
            rest = rest.without(token) if rest is not None else None
        leftover = max(0.0, scale - sum(probs.values())) if rest is not None else 0.0
        return Emission(accept_probs=probs, leftover=leftover, leftover_law=rest or p)
