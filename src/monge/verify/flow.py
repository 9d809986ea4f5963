"""Flows: what a node rule passes on to the drawn candidates of a scaled target, as Layer Verification needs it.

p = target law, q = draft law, s = scale in (0, 1].
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.proposal import Proposal
from monge.verify.base import NodeRule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeProblem:
    """One node whose candidates are drawn, with a target that is scaled down.

    Args:
        target_law: p, the law of the next token at this node.
        scale: s in (0, 1]; the mass to be transported is s p, and 1 - s stands for "nothing accepted".
        proposal: How the candidates were drawn.
        offers: The candidates' tokens in drawing order, repeats kept; at least one.
        draws: Source of randomness for rules that realise part of their decision.
    """

    target_law: Law
    scale: float
    proposal: Proposal
    offers: tuple[int, ...]
    draws: Draws


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A coupling of the candidates with s p, seen from one tuple of candidates.

    Args:
        accept_probs: pi(x | candidates) of every distinct candidate; they sum to at most one.
        token_ids: Increasing ids of the tokens with accepted mass, `[support]`.
        masses: y(x) = E[pi(x | candidates)] over the draws of the candidates (and of the rule), `[support]`; y <= s p.
    """

    accept_probs: Mapping[int, float]
    token_ids: Int64[Tensor, " support"]
    masses: Float64[Tensor, " support"]


class FlowRule(NodeRule):
    """A node rule that can be lifted to whole trees: it also answers for scaled targets, with probabilities, not tokens.

    A scaled target is the rule run on the law (s p, 1 - s) with one more symbol that is never drafted; that symbol and every
    token that is not a candidate read "nothing accepted".
    """

    @abstractmethod
    def flow(self, problem: NodeProblem) -> Flow:
        """The flow at one node."""

    def flows(self, problems: Sequence[NodeProblem]) -> Sequence[Flow]:
        """The flows at many nodes, of one layer or of many requests; a rule with a batched twin overrides this."""
        return [self.flow(problem) for problem in problems]
