"""What a flow promises, by enumeration.

The accepted masses are the averages of what is accepted, and fit into the target.
"""

import torch

from monge.laws.draws import Draws, TapeDraws
from monge.laws.law import Law, SparseLaw
from monge.laws.proposal import Proposal
from monge.oracle.exact_law import exact_law, law_error
from monge.verify.flow import FlowRule
from monge.verify.problem import NodeProblem
from tests.verify.acceptance import EXACT


def check_flow(rule: FlowRule, p: Law, scale: float, proposal: Proposal) -> None:
    """The flow at one node, for every tuple of candidates.

    For the whole target it is also what the rule itself accepts.
    """
    accepted: dict[int, float] = {}
    for candidates, prob in exact_law(proposal.draw).items():
        flow = rule.flow(
            NodeProblem(
                target_law=p,
                scale=scale,
                proposal=proposal,
                candidates=tuple(candidates),
                draws=TapeDraws(()),
            )
        )
        assert set(flow.accept_probs) <= set(candidates)
        assert min(flow.accept_probs.values()) >= 0.0
        assert sum(flow.accept_probs.values()) <= 1.0 + EXACT
        for token, accept in flow.accept_probs.items():
            accepted[token] = accepted.get(token, 0.0) + prob * accept
        declared = dict(zip(flow.token_ids.tolist(), flow.masses.tolist(), strict=True))
        assert bool((flow.masses <= scale * p.at(flow.token_ids) + EXACT).all())
    assert law_error(accepted, declared) < EXACT
    if scale == 1.0:
        assert emits_the_completion(rule, p, proposal) < EXACT


def emits_the_completion(rule: FlowRule, p: Law, proposal: Proposal) -> float:
    """How far the rule's own tokens, given the candidates, are from accepting by its flow and drawing what is left."""

    def emitted(draws: Draws):  # type: ignore[no-untyped-def]
        candidates = proposal.draw(draws)
        return candidates, rule.emit(p, proposal, candidates, draws)

    def completed(draws: Draws):  # type: ignore[no-untyped-def]
        candidates = proposal.draw(draws)
        flow = rule.flow(
            NodeProblem(
                target_law=p,
                scale=1.0,
                proposal=proposal,
                candidates=tuple(candidates),
                draws=draws,
            )
        )
        tokens, probs = list(flow.accept_probs), list(flow.accept_probs.values())
        choice = _law(list(range(len(tokens) + 1)), [*probs, max(0.0, 1.0 - sum(probs))])
        index = draws.categorical(choice)
        if index < len(tokens):
            return candidates, tokens[index]
        masses = p.sparse().probs - _at(flow.token_ids, flow.masses, p.sparse().token_ids)
        return candidates, draws.categorical(
            _law(p.sparse().token_ids.tolist(), masses.clamp_min(0.0).tolist())
        )

    return law_error(exact_law(emitted), exact_law(completed))


def _law(tokens: list[int], masses: list[float]) -> Law:
    kept = [(token, mass) for token, mass in zip(tokens, masses, strict=True) if mass > 1e-15]
    probs = torch.tensor([mass for _, mass in kept], dtype=torch.float64)
    return SparseLaw(torch.tensor([token for token, _ in kept]), probs / probs.sum())


def _at(token_ids: torch.Tensor, masses: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    table = dict(zip(token_ids.tolist(), masses.tolist(), strict=True))
    return torch.tensor([table.get(token, 0.0) for token in wanted.tolist()], dtype=torch.float64)
