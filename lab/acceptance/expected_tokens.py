"""Accepted tokens that a rule expects on one drawn tree: the mean of its decisions, with far less noise."""

from collections.abc import Sequence

from lab.acceptance.tree_values import expected_by_layers
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence
from monge.laws.tree import TokenTree
from monge.verify.base import Rule, as_verifier
from monge.verify.flow import Emission, Flow, FlowRule
from monge.verify.layer import Layer
from monge.verify.problem import ScoredTree


def expected_tokens(
    rule: Rule, tree: TokenTree, target_laws: LawSequence, draws: Draws, *, decisions: int
) -> float:
    """Estimate E[accepted tokens], without bias over trees.

    Node rules that give their flows are followed through the tree; for Layer Verification the
    weights of its first pass are added up. Others decide `decisions` times.

    Args:
        rule: Exact for the tree's candidates, none of which is of `Arbitrary` origin.
        tree: A drawn tree.
        target_laws: One per node.
        draws: Source of randomness, for rules that realise part of their decision.
        decisions: Number of decisions of a rule without flows.
    """
    scored = ScoredTree(tree=tree, target_laws=target_laws, draws=draws)
    if isinstance(rule, FlowRule):
        return _walked(rule, scored)
    if isinstance(rule, Layer):
        return expected_by_layers(rule, scored)
    verifier = as_verifier(rule)
    verdicts = [verifier.verify(tree, target_laws, draws) for _ in range(decisions)]
    return sum(verdict.num_accepted for verdict in verdicts) / decisions


def _walked(rule: FlowRule, scored: ScoredTree) -> float:
    """The sum of the chances to reach every node."""
    tree, layer, total = scored.tree, {0: 1.0}, 0.0
    while parents := [node for node in layer if tree.candidates[node]]:
        below: dict[int, float] = {}
        flows = [rule.flow(scored.problem(node)) for node in parents]
        for node, flow in zip(parents, flows, strict=True):
            children = list(dict.fromkeys(tree.candidates[node]))
            tokens = [tree.token_ids[child] for child in children]
            if isinstance(flow, Emission) or rule.counts_hits:
                emitted = [flow.accept_probs[token] for token in tokens]
            else:
                emitted = _emitted(flow, scored.target_laws[node], tokens)
            below |= {
                child: layer[node] * chance
                for child, chance in zip(children, emitted, strict=True)
                if chance > 0.0
            }
        total += sum(below.values())
        layer = below
    return total


def _emitted(flow: Flow, p: Law, tokens: Sequence[int]) -> list[float]:
    """P(the rule emits each candidate), be it as the correction token, which follows p less the accepted masses."""
    accepted = [flow.accept_probs[token] for token in tokens]
    rejected, left = 1.0 - sum(flow.accept_probs.values()), 1.0 - float(flow.masses.sum())
    if rejected <= 0.0 or left <= 0.0:
        return accepted
    masses = dict(zip(flow.token_ids.tolist(), flow.masses.tolist(), strict=True))
    return [
        chance + rejected * max(0.0, p.prob(token) - masses.get(token, 0.0)) / left
        for chance, token in zip(accepted, tokens, strict=True)
    ]
