"""Recursive rejection sampling with independent candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal
from monge.verify.flow import Flow, FlowRule, walked, with_fixed
from monge.verify.functional.rejection import recursive_rejection, rejection
from monge.verify.functional.where import HostDraws
from monge.verify.problem import NodeProblem
from monge.verify.programs import Programs, walk


@dataclass(frozen=True, slots=True)
class RecursiveRejection(FlowRule):
    """Try the candidates in turn, each against what the rejections so far have left of p.

    Law:
        The emitted token follows p for independent draws from q (`Iid`), deterministic candidates
        (each a point mass), and deterministic candidates followed by independent draws (`Mixed`).
        Invariant: before each test, if its candidate were the only candidate, the output law would
        be the current P.

    Rule:
        `P = p`; for X in drawing order, drawn from q: accept with probability `min(1, P_X / q_X)`,
        else `P = (P - q)_+ / |(P - q)_+|`; when none is accepted emit `y ~ P`. A repeated candidate
        is tested again, and fails, since a rejected token has no mass left; its residual step still
        counts. Acceptance is `1 - prod_k (1 - beta_k)`, `beta_k = sum_i min(P_i, q_i)` of the k-th test.

    Cost:
        O(K vocab) for K candidates in the worst case, a residual per rejection.

    Reference:
        SpecInfer (Miao et al., arXiv 2305.09781, Algorithm 2; it visits candidates in random order,
        which is the same law for exchangeable candidates); recursive speculative decoding (Jeon et
        al., arXiv 2402.14160); MCSD (Yang et al., arXiv 2401.06706).
    """

    accepts = frozenset[type[Proposal]]({Iid, Mixed, Deterministic})
    programs = Programs(
        by_kind={Iid: recursive_rejection, Mixed: recursive_rejection, Deterministic: walk}
    )

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        num_fixed = len(proposal.fixed_ids)
        return emitted(target_law, proposal.draft_law, candidates, draws, num_fixed=num_fixed)

    def flow(self, problem: NodeProblem) -> Flow:
        """The flow of `emit`. The residual does not depend on the rejected tokens, so y has a closed form.

        With T = s p and M = 1, each draw takes `min(T, M q)` of T, and as much in all of M.
        """
        if (q := problem.proposal.draft_law) is None:
            return walked(problem)
        p, scale = problem.target_law, problem.scale
        probs, reach, undecided = dict.fromkeys(problem.candidates, 0.0), 1.0, 1.0
        for token in problem.fixed:
            probs[token] = scale * p.prob(token)
            reach = undecided = undecided - probs[token]
        part = q.sparse()
        wanted = left = scale * p.at(part.token_ids)
        for x in problem.drawn:
            if undecided <= 0.0:
                break  # everything is accepted already
            drawn = undecided * part.probs
            taken = left.minimum(drawn)
            place = int(torch.searchsorted(part.token_ids, x))
            accept = float(taken[place] / drawn[place])
            probs[x] += reach * accept
            reach *= 1.0 - accept
            left, undecided = left - taken, float((drawn - taken).sum())
        token_ids, masses = with_fixed(problem, part.token_ids, wanted - left)
        return Flow(accept_probs=probs, token_ids=token_ids, masses=masses)


def emitted(
    target_law: Law,
    draft_law: Law | None,
    candidates: Sequence[int],
    draws: Draws,
    *,
    num_fixed: int = 0,
    replacement: bool = True,
) -> int:
    """Emit a token by `rejection`: an accepted candidate, or a draw from the residual of p.

    Args:
        target_law: p.
        draft_law: q; `None` if all candidates are deterministic.
        candidates: The candidates in drawing order.
        draws: Source of randomness.
        num_fixed: Number of deterministic candidates, which come first.
        replacement: See `rejection`.
    """
    if draft_law is None:
        # Each q is a point mass: accepting x with probability P_x, else drawing from P without x,
        # is one draw from p.
        return draws.categorical(target_law)
    token, left = rejection(
        target_law,
        draft_law,
        candidates,
        (True,) * num_fixed,
        HostDraws(draws),
        is_open=np.True_,
        replacement=replacement,
    )
    return token if token >= 0 else draws.categorical(left)
