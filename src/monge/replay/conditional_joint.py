"""The candidates of a node given the emitted token, for rules that compare all draws at once.

p = target law, q = draft law, y = the committed token, K = `width`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import SparseLaw
from monge.core.proposal import Iid, Mixed, Proposal
from monge.replay.conditional import ConditionalCandidates
from monge.replay.logged_token import LoggedToken
from monge.verify.flow import Flow
from monge.verify.k_seq import divisors
from monge.verify.optimal import Optimal
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True)
class SameTest(ConditionalCandidates):
    """Draw for K-SEQ, which tests every draw with the same ratio.

    With `m = min(p / rho, q)` and beta its mass, y is accepted as the k-th draw with probability
    `(1 - beta)^(k-1) m_y`, in all `gamma m_y`; rejected draws have law `(q - m) / (1 - beta)`.
    """

    def _chance(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> float:
        assert isinstance(proposal, Iid)
        logged.require(proposal.law)
        y, q = logged.token, proposal.law.sparse()
        rho, gamma = divisors(logged.law, q, proposal.width)
        p_y = logged.law.prob(y)
        return min(1.0, gamma * min(p_y / rho, q.prob(y)) / p_y)

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        assert isinstance(proposal, Iid)
        q, width = proposal.law.sparse(), proposal.width
        is_accepted = draws.bernoulli(self._chance(logged, proposal, draws))
        rho, _ = divisors(logged.law, q, width)
        kept = (logged.law.at(q.token_ids) / rho).minimum(q.probs)
        refused = q.probs - kept
        missed = min(1.0, float(refused.sum()))  # 1 - beta
        rejected = None if missed == 0.0 else _normalised(q.token_ids, refused)
        if not is_accepted:
            assert rejected is not None, "with beta = 1 the first draw is accepted"
            return tuple(draws.categorical(rejected) for _ in range(width))
        return _first_at(logged.token, q, rejected, missed, width=width, draws=draws)


@dataclass(frozen=True, slots=True)
class JointDecision(ConditionalCandidates):
    """Draw for the optimal rule, which accepts y with probability (accepted mass of y) / p_y.

    Given that, draws are proposed from their own law, given that y is among them, and kept with the
    probability with which the rule accepts y; or proposed, and kept with the probability with which
    it rejects all, since a rejected node is emitted from one law whatever was drawn. About K
    proposals on average.

    Args:
        rule: The optimal rule with its settings.
    """

    rule: Optimal

    def _chance(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> float:
        assert isinstance(proposal, Iid | Mixed)
        flow = self._flow(logged, proposal, proposal.draw(draws), draws)
        # One token, or none that can be drawn.
        mass = float(flow.masses[flow.token_ids == logged.token].sum())
        return min(1.0, mass / logged.law.prob(logged.token))

    def draw(self, logged: LoggedToken, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        assert isinstance(proposal, Iid | Mixed)
        fixed = proposal.fixed if isinstance(proposal, Mixed) else ()
        is_accepted = logged.token not in fixed and draws.bernoulli(
            self._chance(logged, proposal, draws)
        )
        while True:
            tokens = (
                (*fixed, *containing(proposal, logged.token, draws))
                if is_accepted
                else proposal.draw(draws)
            )
            probs = self._flow(logged, proposal, tokens, draws).accept_probs
            accepted = sum(prob for token, prob in probs.items() if token not in fixed)
            if draws.bernoulli(
                min(1.0, max(0.0, probs[logged.token] if is_accepted else 1.0 - accepted))
            ):
                return tokens

    def _flow(
        self, logged: LoggedToken, proposal: Iid | Mixed, candidates: tuple[int, ...], draws: Draws
    ) -> Flow:
        logged.require(proposal.law)
        problem = NodeProblem(
            target_law=logged.law, scale=1.0, proposal=proposal, candidates=candidates, draws=draws
        )
        flow = self.rule.flow(problem)
        assert isinstance(flow, Flow), "the optimal rule knows its accepted masses"
        return flow


def containing(proposal: Iid | Mixed, token: int, draws: Draws) -> tuple[int, ...]:
    """Return independent draws, given that a token is among them."""
    q, width = proposal.law.sparse(), proposal.width
    others = q.without(token)
    missed = 0.0 if others is None else 1.0 - q.prob(token)
    return _first_at(token, q, others, missed, width=width, draws=draws)


def _first_at(
    token: int,
    q: SparseLaw,
    others: SparseLaw | None,
    missed: float,
    *,
    width: int,
    draws: Draws,
) -> tuple[int, ...]:
    """Draw the first place of a token, the draws from `others` before it, and free ones after it."""
    weights = torch.tensor([missed**number for number in range(width)], dtype=torch.float64)
    place = draws.categorical(_normalised(torch.arange(width), weights))
    before = [draws.categorical(others) for _ in range(place)] if others is not None else []
    return (*before, token, *(draws.categorical(q) for _ in range(width - place - 1)))


def _normalised(token_ids: Tensor, masses: Tensor) -> SparseLaw:
    kept = masses > 0.0
    return SparseLaw(token_ids[kept], masses[kept] / masses.sum())
