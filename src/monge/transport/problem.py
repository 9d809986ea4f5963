"""The transport problem of one node.

A target law, and the joint law of the candidates it is offered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from monge.core.errors import LawError
from monge.core.proposal import Proposal
from monge.transport.candidates import CandidateLaw, TokenTuple
from monge.transport.laws import check_law


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransportProblem:
    """Find Y given the candidates t, with law(Y) = p exactly, that maximises P(Y in t).

    This is optimal transport from tuples to tokens with *membership cost*: 1 when the token is not
    among the candidates (SpecTr, Sun et al., arXiv 2310.15141, section 3).

    Args:
        target: p, one mass per token, `[vocab]`.
        candidates: P(t).

    Raises:
        LawError: If p is no law, or the two do not cover one vocabulary.
    """

    target: Float64[np.ndarray, " vocab"]
    candidates: CandidateLaw

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", check_law("target", self.target))
        if self.target.size != self.candidates.num_tokens:
            raise LawError(
                f"target over {self.target.size} tokens, candidates over "
                f"{self.candidates.num_tokens}"
            )

    @classmethod
    def from_proposal(
        cls, target: Float64[np.ndarray, " vocab"], proposal: Proposal
    ) -> "TransportProblem":
        """Candidates drawn by a proposal of the core."""
        return cls(target=target, candidates=CandidateLaw.from_proposal(target.size, proposal))

    @classmethod
    def from_draft_laws(
        cls,
        target: Float64[np.ndarray, " vocab"],
        draft_laws: Sequence[Float64[np.ndarray, " vocab"]],
    ) -> "TransportProblem":
        """Independent candidates, one from each draft law."""
        return cls(target=target, candidates=CandidateLaw.independent(draft_laws))

    @classmethod
    def from_joint_law(
        cls, target: Float64[np.ndarray, " vocab"], masses: Mapping[TokenTuple, float]
    ) -> "TransportProblem":
        """Candidates with any joint law, listed."""
        return cls(target=target, candidates=CandidateLaw.explicit(target.size, masses))
