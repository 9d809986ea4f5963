"""The transport problem of one node.

A target law, and the joint law of the candidates it is offered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monge.core.errors import LawError
from monge.core.proposal import Proposal
from monge.transport.candidates import CandidateLaw, TokenTuple
from monge.transport.laws import Vector, check_law


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

    target: Vector
    candidates: CandidateLaw

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", check_law("target", self.target))
        if self.target.size != self.candidates.num_tokens:
            raise LawError(
                f"target over {self.target.size} tokens, candidates over "
                f"{self.candidates.num_tokens}"
            )

    @classmethod
    def from_proposal(cls, target: Vector, proposal: Proposal) -> "TransportProblem":
        """Candidates drawn by a proposal of the core."""
        return cls(target=target, candidates=CandidateLaw.from_proposal(target.size, proposal))

    @classmethod
    def from_draft_laws(cls, target: Vector, draft_laws: Sequence[Vector]) -> "TransportProblem":
        """Independent candidates, one from each draft law."""
        return cls(target=target, candidates=CandidateLaw.independent(draft_laws))

    @classmethod
    def from_joint_law(
        cls, target: Vector, masses: Mapping[TokenTuple, float]
    ) -> "TransportProblem":
        """Candidates with any joint law, listed."""
        return cls(target=target, candidates=CandidateLaw.explicit(target.size, masses))
