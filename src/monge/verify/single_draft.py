"""Speculative sampling with one candidate: the maximal coupling."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law, residual
from monge.core.proposal import Deterministic, Iid, Proposal
from monge.verify.flow import Flow, FlowRule, walked
from monge.verify.functional import recursive_rejection
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk


@dataclass(frozen=True, slots=True)
class SingleDraft(FlowRule):
    """Accept the one candidate with probability min(1, p/q), otherwise draw from what p has beyond q.

    Law:
        The emitted token follows p when the candidate x was drawn from q (`Iid`, width 1), or is a
        function of the path (`Deterministic`, one candidate; q is then the point mass at x).

    Rule:
        Accept x with probability `min(1, p_x / q_x)`; otherwise emit `y ~ (p - q)_+ / |(p - q)_+|`.
        Acceptance is `sum_i min(p_i, q_i) = 1 - TV(p, q)`, the optimum for one candidate.

    Cost:
        Two look-ups; O(vocab) only after a rejection.

    Reference:
        Leviathan et al., arXiv 2211.17192, Algorithm 1 (p and q as here); Chen et al., arXiv
        2302.01318 (p and q swapped).
    """

    accepts = frozenset[type[Proposal]]({Iid, Deterministic})
    max_width = 1
    programs = Programs(by_kind={Iid: recursive_rejection, Deterministic: walk}, max_width=1)

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        (x,) = candidates
        p = target_law
        if not isinstance(proposal, Iid):
            # q is a point mass: accepting with probability p_x and otherwise drawing from p without
            # x is a draw from p.
            return draws.categorical(p)
        q = proposal.law
        if draws.bernoulli(min(1.0, p.prob(x) / q.prob(x))):
            return x
        return draws.categorical(residual(p, q))

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, with y = min(s p, q)."""
        if not isinstance(problem.proposal, Iid):
            return walked(problem)
        (x,) = problem.candidates
        p, q, scale = problem.target_law, problem.proposal.law, problem.scale
        part = q.sparse()
        return Flow(
            accept_probs={x: min(1.0, scale * p.prob(x) / q.prob(x))},
            token_ids=part.token_ids,
            masses=(scale * p.at(part.token_ids)).minimum(part.probs),
        )
