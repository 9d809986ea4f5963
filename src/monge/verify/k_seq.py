"""K-SEQ: independent candidates, tested in turn with the same scaled ratio."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Float64
from torch import Tensor

from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.lazy_laws import below
from monge.laws.proposal import Deterministic, Iid, Proposal
from monge.verify.flow import Flow, FlowRule, walked
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class KSeq(FlowRule):
    """Test every draw against the same p / (rho q), rho large enough that a single residual pays for all tests.

    Law:
        The emitted token follows p for independent draws from q (`Iid`), repeats kept: their number
        K is part of the rule. Also for deterministic candidates, which are left to sample and match.

    Rule:
        `beta(rho) = sum_i min(p_i / rho, q_i)`; rho in [1, K] is the root of `1 - (1 - beta)^K =
        rho beta`, *rounded up*, and `gamma = (1 - (1 - beta)^K) / beta <= rho` is computed from the
        rounded rho. For X in drawing order: accept with probability `min(1, p_X / (rho q_X))`; when
        none is accepted emit y proportional to `p - gamma min(p / rho, q)`, whose mass is `(1 -
        beta)^K`. Acceptance is `1 - (1 - beta)^K`, and at least (1 - (1 - 1/K)^K) times the
        optimum; with a larger rho residual tokens would hit candidates as well.

    Cost:
        A bisection over the support of q, about 50 sums, then K look-ups; O(vocab) when no
        candidate is accepted.

    Reference:
        SpecTr (Sun et al., arXiv 2310.15141), Algorithm 2; p and q are swapped there. The root is
        exact to the last bit.
    """

    accepts = frozenset[type[Proposal]]({Iid, Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        p = target_law
        if (q := proposal.draft_law) is None:
            return draws.categorical(p)
        rho, gamma = divisors(p, q, len(candidates))
        for x in candidates:
            if draws.bernoulli(min(1.0, p.prob(x) / (rho * q.prob(x)))):
                return x
        part = q.sparse()
        taken = (p.at(part.token_ids) / rho).minimum(part.probs)
        # gamma <= rho, so what is accepted exceeds p only by the rounding of the product.
        return draws.categorical(below(p, part.token_ids, gamma * taken))

    def flow(self, problem: NodeProblem) -> Flow:
        """As emitted, the residual's hits included.

        With `m = min(s p / rho, q)`, what the K tests leave, `s p - gamma m`, is emitted where none
        accepts, and is then one of the candidates with probability `1 - (1 - (q - m) / (1 -
        beta))^K`.
        """
        if (q := problem.proposal.draft_law) is None:
            return walked(problem)
        p, scale, candidates = problem.target_law, problem.scale, problem.candidates
        width = len(candidates)
        rho, gamma = divisors(p, q, width, scale)
        part = q.sparse()
        wanted = scale * p.at(part.token_ids)
        taken = (wanted / rho).minimum(part.probs)
        refused = float((part.probs - taken).sum())  # 1 - beta, never below zero
        left = (wanted - gamma * taken).clamp_min(0.0)
        probs, reach = dict.fromkeys(candidates, 0.0), 1.0
        places = {x: int(torch.searchsorted(part.token_ids, x)) for x in probs}
        for x in candidates:
            accept = float(taken[places[x]] / part.probs[places[x]])
            probs[x] += reach * accept
            reach *= 1.0 - accept
        if refused == 0.0:  # the first candidate is always accepted
            return Flow(accept_probs=probs, token_ids=part.token_ids, masses=gamma * taken)
        hits = (
            {x: float(left[place]) / refused**width for x, place in places.items()}
            if reach > 0.0
            else {}
        )
        for x, hit in hits.items():
            probs[x] += reach * hit / max(1.0, sum(hits.values()))  # above one by rounding only
        hit_probs = 1.0 - (1.0 - (part.probs - taken) / refused) ** width
        return Flow(
            accept_probs=probs, token_ids=part.token_ids, masses=gamma * taken + left * hit_probs
        )


def divisors(p: Law, q: Law, width: int, scale: float = 1.0) -> tuple[float, float]:
    """The smallest float rho in [1, K] that is not below its gamma, and that gamma, for the target `scale * p`."""
    part = q.sparse()
    p_masses, q_masses = scale * p.at(part.token_ids), part.probs
    low, high = 1.0, float(width)
    gamma = _gamma(p_masses, q_masses, width, low)
    if gamma <= low:
        return low, gamma
    # Of opposite signs, or zero.
    too_low, enough = gamma - low, _gamma(p_masses, q_masses, width, high) - high
    for step in count():
        # A secant finds the root in a few steps; every third step halves the bracket, so that it
        # closes whatever its shape.
        rho = (
            low + (high - low) * too_low / (too_low - enough)
            if step % 3 and too_low > enough
            else 0.5 * (low + high)
        )
        if not low < rho < high:
            rho = 0.5 * (low + high)
        # Neighbouring floats: take the upper one, or the residual could be negative.
        if not low < rho < high:
            break
        missing = _gamma(p_masses, q_masses, width, rho) - rho
        if missing <= 0.0:
            high, enough = rho, missing
        else:
            low, too_low = rho, missing
    return high, _gamma(p_masses, q_masses, width, high)


def _gamma(
    p_masses: Float64[Tensor, " support"],
    q_masses: Float64[Tensor, " support"],
    width: int,
    rho: float,
) -> float:
    beta = min(1.0, float((p_masses / rho).minimum(q_masses).sum()))
    # 0: disjoint supports, where the residual is p for every gamma. 1: p equals q at rho = 1, where
    # the first candidate is always accepted.
    if beta in {0.0, 1.0}:
        return 1.0
    return -math.expm1(width * math.log1p(-beta)) / beta
