"""One maximal-coupling step with the first candidate; the correction may hit another one."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law, residual
from monge.core.proposal import Deterministic, Iid, Proposal
from monge.verify.flow import Flow, FlowRule, walked, with_fixed
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class NaiveTree(FlowRule):
    """Single-draft step with the first candidate.

    A residual token that is another candidate is kept too.

    Law:
        The emitted token follows p for independent draws from q (`Iid`) and for deterministic
        candidates. The rule reads the first candidate only, and that one was drawn from q whatever
        the others are.

    Rule:
        Accept X_1 with probability `min(1, p_X1 / q_X1)`; otherwise emit `y ~ res = (p - q)_+ / |(p
        - q)_+|`, which is an accepted token where it is one of the other K - 1 candidates.
        Acceptance is `beta + (1 - beta) sum_t res_t (1 - (1 - q_t)^(K - 1))`, `beta = sum_i
        min(p_i, q_i)`.

    Cost:
        Two look-ups; O(vocab) after the first candidate's rejection, whatever K is.

    Reference:
        A baseline of the delayed tree expansion paper, arXiv 2602.16994, under this name; the step
        is Algorithm 1 of Leviathan et al., arXiv 2211.17192.
    """

    counts_hits = True
    accepts = frozenset[type[Proposal]]({Iid, Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p, x = target_law, candidates[0]
        if not isinstance(proposal, Iid):
            # q is the point mass at the first candidate: accepting with p_x, else drawing from p
            # without x, is a draw from p.
            return draws.categorical(p)
        q = proposal.law
        if draws.bernoulli(min(1.0, p.prob(x) / q.prob(x))):
            return x
        return draws.categorical(residual(p, q))

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, the residual's hits included; the other candidates are independent of the first."""
        if not isinstance(problem.proposal, Iid):
            return walked(problem)
        return flow_of_first(problem, (), problem.proposal.law)


def flow_of_first(problem: NodeProblem, fixed: tuple[int, ...], q: Law) -> Flow:
    """The flow of a single-draft step with the first of K draws from q; its residual hits the other candidates.

    With `m = min(s p, q)`: `pi(X_1) = m / q`, then `pi(t) = (1 - pi(X_1)) (s p - m)(t) / (1 - |m|)`
    for the other candidates; `y = m + (s p - m) (1 - (1 - q)^(K - 1))`, and `y = s p` for fixed
    ones.
    """
    p, scale, drawn = problem.target_law, problem.scale, problem.candidates[len(fixed) :]
    part = q.sparse()
    wanted = scale * p.at(part.token_ids)
    taken = wanted.minimum(part.probs)
    refused = float((part.probs - taken).sum())  # 1 - |m|, never below zero
    x = drawn[0]
    accept = min(1.0, scale * p.prob(x) / q.prob(x))
    probs = dict.fromkeys(problem.candidates, 0.0) | {x: accept}
    for token in (*fixed, *drawn[1:]):
        left = scale * p.prob(token) - q.prob(token)
        if token != x and left > 0.0 and refused > 0.0:
            probs[token] = (1.0 - accept) * min(1.0, left / refused)
    masses = taken
    if len(drawn) > 1:
        masses = taken + (wanted - taken) * (1.0 - (1.0 - part.probs) ** (len(drawn) - 1))
    token_ids, masses = with_fixed(problem, fixed, part.token_ids, masses)
    return Flow(accept_probs=probs, token_ids=token_ids, masses=masses)
