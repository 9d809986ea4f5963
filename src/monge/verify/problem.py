"""What a rule is asked: one node, or one request's tree."""

from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.proposal import Proposal
from monge.core.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeProblem:
    """One node whose candidates are drawn, with the target's law there, scaled down where a rule of whole trees asks.

    Args:
        target_law: p, the law of the next token at this node.
        scale: s in (0, 1]; the mass to be transported is s p, and 1 - s stands for "nothing
            accepted".
        proposal: How the candidates were drawn.
        candidates: The candidates' tokens in drawing order, repeats kept; at least one.
        draws: Source of randomness for rules that realise part of their decision.
    """

    target_law: Law
    scale: float = 1.0
    proposal: Proposal
    candidates: tuple[int, ...]
    draws: Draws


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTree:
    """One request's part of a round: see `Verifier.verify` in `verify/base.py`."""

    tree: TokenTree
    target_laws: LawSequence
    draws: Draws
