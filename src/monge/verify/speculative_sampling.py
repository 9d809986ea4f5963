"""Speculative sampling with a single candidate: the maximal coupling."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import Excess, LazyLaw
from monge.laws.proposal import Deterministic, Iid, Proposal
from monge.verify.flow import Flow, FlowRule, LazyFlow, total_of, walked, with_fixed
from monge.verify.functional.rejection import recursive_rejection
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk
from monge.verify.recursive_rejection import emitted


@dataclass(frozen=True, slots=True)
class SpeculativeSampling(FlowRule):
    """Accept the candidate with probability min(1, p/q), otherwise draw from what p has beyond q.

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
        place = len(proposal.fixed_ids)
        return emitted(target_law, proposal.draft_law, candidates[place : place + 1], draws)

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, the residual's hits included; the other candidates are independent of the first draw.

        With `m = min(s p, q)`: `pi(X_1) = m / q`, then `pi(t) = (1 - pi(X_1)) (s p - m)(t) / (1 -
        |m|)` for the other candidates; `y = m + (s p - m) (1 - (1 - q)^(K - 1))`, and `y = s p` for
        fixed candidates.
        """
        if (q := problem.proposal.draft_law) is None:
            return walked(problem)
        p, scale = problem.target_law, problem.scale
        x, *others = problem.drawn
        if isinstance(p, LazyLaw) and problem.candidates == (x,):
            accept = min(1.0, scale * p.prob(x) / q.prob(x))
            return LazyFlow(accept, x, Excess(scale, p, q))
        part = q.sparse()
        wanted = scale * p.at(part.token_ids)
        masses = taken = wanted.minimum(part.probs)
        refused = total_of(part.probs - taken)  # 1 - |m|, never below zero
        accept = min(1.0, scale * p.prob(x) / q.prob(x))
        probs = dict.fromkeys(problem.candidates, 0.0) | {x: accept}
        for token in (*problem.fixed, *others):
            left = scale * p.prob(token) - q.prob(token)
            if token != x and left > 0.0 and refused > 0.0:
                probs[token] = (1.0 - accept) * min(1.0, left / refused)
        if others:
            masses = taken + (wanted - taken) * (1.0 - (1.0 - part.probs) ** len(others))
        token_ids, masses = with_fixed(problem, part.token_ids, masses)
        return Flow(accept_probs=probs, token_ids=token_ids, masses=masses)
