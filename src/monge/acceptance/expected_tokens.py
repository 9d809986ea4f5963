"""Accepted tokens that a rule expects on one drawn tree, without throwing its coins: the same mean, far less noise."""

from collections.abc import Sequence

from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.tree import TokenTree
from monge.verify.base import Rule, as_verifier
from monge.verify.flow import Emission, Flow, FlowRule
from monge.verify.layer import Layer
from monge.verify.layer_pass import LayerPass
from monge.verify.problem import NodeProblem, ScoredTree


def expected_tokens(rule: Rule, tree: TokenTree, target_laws: LawSequence, draws: Draws, *, decisions: int) -> float:
    """An estimate of E[accepted tokens] whose mean over trees is exact.

    Node rules that give their flows are followed through the tree; for Layer Verification the weights of its first pass are
    added up. Others decide `decisions` times.

    Args:
        rule: Exact for the tree's candidates, none of which is of `Arbitrary` origin.
        tree: As it was drawn.
        target_laws: One per node.
        draws: Source of randomness, for rules that realise part of their decision.
        decisions: How often a rule without flows decides.
    """
    if isinstance(rule, FlowRule):
        return _walked(rule, tree, target_laws, draws)
    if isinstance(rule, Layer):
        layers = LayerPass(ScoredTree(tree=tree, target_laws=target_laws, draws=draws))
        while layers.is_open:
            layers.descend(rule.flows(layers.problems()))
        return layers.expected_accepted
    verifier = as_verifier(rule)
    return sum(verifier.verify(tree, target_laws, draws).num_accepted for _ in range(decisions)) / decisions


def _walked(rule: FlowRule, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> float:
    """Chances to reach every node, from the root down, added up."""
    layer, total = {0: 1.0}, 0.0
    while parents := [node for node in layer if tree.candidates[node]]:
        problems = [
            NodeProblem(
                target_law=target_laws[node],
                scale=1.0,
                proposal=tree.proposals[node],
                candidates=tuple(tree.token_ids[child] for child in tree.candidates[node]),
                draws=draws,
            )
            for node in parents
        ]
        below: dict[int, float] = {}
        for node, flow in zip(parents, rule.flows(problems), strict=True):
            children = list(dict.fromkeys(tree.candidates[node]))
            tokens = [tree.token_ids[child] for child in children]
            if isinstance(flow, Emission) or rule.counts_hits:
                emitted = [flow.accept_probs[token] for token in tokens]
            else:
                emitted = _emitted(flow, target_laws[node], tokens)
            below |= {child: layer[node] * chance for child, chance in zip(children, emitted, strict=True) if chance > 0.0}
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
