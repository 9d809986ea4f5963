"""The optimal coupling of a node: every draw gets a score, and the smallest below a threshold is accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal
from monge.verify.flow import Flow, FlowRule, total_of, walked, with_fixed
from monge.verify.functional.optimum import optimal
from monge.verify.node_line import chances, decide
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk
from monge.verify.recursive_rejection import emitted


@dataclass(frozen=True, slots=True)
class Optimal(FlowRule):
    """The optimal rule for independent draws, with or without deterministic candidates beside them.

    Law:
        The emitted token follows p for K independent draws from q (`Iid`), for deterministic
        candidates D followed by K independent draws from a law that gives them no mass (`Mixed`),
        and for deterministic candidates alone.

    Rule:
        `alpha = min over sets H of [p(H) + 1 - q(H)^K]`, H outside D; `v0 = 1 - (1 - alpha)^(1/K)`;
        `a = min(p, mu q)` with mu such that a sums to alpha. The support of q lies on [0, 1] by
        decreasing p / q. Each draw takes a uniform position u in the window of its token, and its
        score is u or the swap partner of u (see `verify/functional/lines.py`), so that scores are
        uniform and token y, if its score is the smallest of K, is below v0 with mass a(y) in all.
        Accept the draw with the smallest score if that is below v0; otherwise emit y proportional
        to `p - a`, over the whole vocabulary, D included. Acceptance is p(D) + alpha, the optimum.

    Cost:
        O(s log s) for the line and O(K s) for the partners of K draws, s = support of q; O(vocab)
        when no draw is accepted. Two uniforms a draw: not enumerable, proved by exact integration
        instead.

    Reference:
        Own construction, novelty not established. The optimum: Hu et al., arXiv 2502.18779; for K =
        2 Khisti et al., arXiv 2410.18234.
    """

    accepts = frozenset[type[Proposal]]({Iid, Mixed, Deterministic})
    is_enumerable = False
    programs = Programs(
        by_kind={Iid: optimal, Mixed: optimal, Deterministic: walk}, takes_fixed_nodes=True
    )

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        q, drawn = proposal.draft_law, candidates[len(proposal.fixed_ids) :]
        # For a single draw, the maximal coupling is optimal, with nothing to lay on a line.
        if q is None or len(drawn) == 1:
            return emitted(target_law, q, drawn, draws)
        return decide(target_law, q, drawn, draws)

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, given the positions or the candidates; the residual delivers deterministic candidates."""
        if problem.proposal.draft_law is None:
            return walked(problem)
        return completed(problem, chances(problem))


def completed(problem: NodeProblem, flow: Flow) -> Flow:
    """Return the flow with what the residual delivers to the deterministic candidates."""
    if not problem.fixed:
        return flow
    rejected = max(0.0, 1.0 - total_of(flow.accept_probs.values()))
    refused = 1.0 - total_of(flow.masses)
    probs = dict(flow.accept_probs)
    for token in problem.fixed:
        due = problem.scale * problem.target_law.prob(token)
        probs[token] = rejected * min(1.0, due / refused) if refused > 0.0 else 0.0
    token_ids, masses = with_fixed(problem, flow.token_ids, flow.masses)
    return Flow(accept_probs=probs, token_ids=token_ids, masses=masses)
