"""Acceptance of a rule by enumeration, and laws as the transport room writes them."""

import numpy as np

from monge.laws.law import Law
from monge.laws.proposal import Proposal
from monge.oracle.exact_law import exact_law
from monge.verify.base import NodeRule
from monge.verify.registry import VERIFIERS

EXACT = 1e-12


def acceptance(name: str, p: Law, proposal: Proposal) -> float:
    """P(the emitted token is one of the candidates), by enumeration of draws and decisions."""
    rule = VERIFIERS.make(name)
    assert isinstance(rule, NodeRule)

    def accepted(draws):  # type: ignore[no-untyped-def]
        candidates = proposal.draw(draws)
        return rule.emit(p, proposal, candidates, draws) in candidates

    return exact_law(accepted).get(True, 0.0)


def masses(weights: list[int]) -> np.ndarray:
    return np.array([value / sum(weights) for value in weights])
