"""Pairs of candidates that all contain the most probable token."""

from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.proposal import Proposal


@dataclass(frozen=True, slots=True)
class HubPairs(Proposal):
    """The hub, that is the most probable token of `law`, and one other token, in an order that is part of the law.

    The first candidate is a draw from the law q; after the hub a comes a draw from q without a,
    after any other token comes the hub: Q(i, a) = q_i and Q(a, i) = q_a q_i / (1 - q_a) for i != a.
    A point mass has no second token, and its hub stands alone.

    Reference:
        SpecHub (Sun et al., arXiv 2411.05289).
    """

    law: Law

    @property
    def hub(self) -> int:
        """The token in every pair; which of several equally probable ones is a function of the law alone."""
        return self.law.top(1)[0]

    def draw(self, draws: Draws) -> tuple[int, ...]:
        hub = self.hub
        rest = self.law.without(hub)
        if rest is None:
            return (hub,)
        first = draws.categorical(self.law)
        return (hub, draws.categorical(rest)) if first == hub else (first, hub)
