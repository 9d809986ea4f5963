"""The transport problem of a node: a target law, and the joint law of the candidates as an explicit list."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64

from monge.core.errors import LawError, OptionError
from monge.laws.law import MASS_TOLERANCE
from monge.laws.proposal import Deterministic, Proposal
from monge.transport.laws import Vector, check_fixed, check_law, check_width, dense

MAX_TUPLES: Final = 1 << 18
"""Most tuples that are listed.

The theory is for small vocabularies; a larger request is a mistake, not a long wait.
"""

TokenTuple = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateLaw:
    """P(t) for every tuple t of candidates that can be drawn.

    Args:
        num_tokens: Size of the vocabulary.
        tuples: Distinct tuples of candidates in drawing order, repeats kept.
        probs: Their masses, positive, summing to 1, `[tuples]`.

    Raises:
        LawError: If the masses are no law, a tuple is listed twice, or a token is outside the
            vocabulary.
    """

    num_tokens: int
    tuples: tuple[TokenTuple, ...]
    probs: Float64[np.ndarray, " tuples"]

    def __post_init__(self) -> None:
        if self.probs.shape != (len(self.tuples),) or not self.tuples:
            raise LawError(
                f"candidates: {len(self.tuples)} tuples but masses of shape {self.probs.shape}"
            )
        if len(set(self.tuples)) != len(self.tuples):
            raise LawError("candidates: a tuple is listed twice; add its masses first")
        outside = {
            token
            for candidates in self.tuples
            for token in candidates
            if not 0 <= token < self.num_tokens
        }
        if outside:
            raise LawError(
                f"candidates: tokens {sorted(outside)} are outside a vocabulary of "
                f"{self.num_tokens}"
            )
        smallest, total = float(self.probs.min()), float(self.probs.sum())
        # A product of K laws, each within the tolerance of one law, is within K tolerances of one.
        allowed = MASS_TOLERANCE * max(1, *(len(candidates) for candidates in self.tuples))
        if not (smallest > 0.0 and abs(total - 1.0) <= allowed):  # written so that NaN fails
            raise LawError(
                "candidates: masses must be positive and sum to 1; got smallest "
                f"{smallest:.6g}, sum {total:.12g}"
            )
        self.probs.setflags(write=False)

    @classmethod
    def explicit(cls, num_tokens: int, masses: Mapping[TokenTuple, float]) -> "CandidateLaw":
        """Any joint law, such as that of a new drafter.

        Tuples of mass zero are dropped.

        Raises:
            LawError: If a mass is negative or NaN, or they do not sum to 1.
        """
        drawn = {candidates: mass for candidates, mass in masses.items() if mass != 0.0}
        return cls(
            num_tokens=num_tokens,
            tuples=tuple(drawn),
            probs=np.array(list(drawn.values()), dtype=np.float64),
        )

    @classmethod
    def deterministic(cls, num_tokens: int, tokens: TokenTuple) -> "CandidateLaw":
        """Always the same candidates."""
        return cls.explicit(num_tokens, {tokens: 1.0})

    @classmethod
    def independent(cls, draft_laws: Sequence[Vector]) -> "CandidateLaw":
        """Independent candidates, a draw from each draft law."""
        check_width(len(draft_laws))
        laws = [check_law(f"draft law {index}", law) for index, law in enumerate(draft_laws)]
        if len({law.size for law in laws}) > 1:
            raise LawError(
                f"draft laws over {[law.size for law in laws]} tokens; all must cover "
                "one vocabulary"
            )
        supports = [np.flatnonzero(law).tolist() for law in laws]
        _check_count(np.prod([len(support) for support in supports], dtype=float))
        masses = {
            candidates: float(
                np.prod([law[token] for law, token in zip(laws, candidates, strict=True)])
            )
            for candidates in itertools.product(*supports)
        }
        return cls.explicit(laws[0].size, masses)

    @classmethod
    def iid(cls, q: Vector, width: int) -> "CandidateLaw":
        """`width` independent draws from q."""
        return cls.independent([q] * width)

    @classmethod
    def without_replacement(cls, q: Vector, width: int) -> "CandidateLaw":
        """`width` draws from q, each given that it is new.

        The whole support where that is smaller.
        """
        check_width(width)
        law = check_law("draft law", q)
        support: list[int] = np.flatnonzero(law).tolist()
        width = min(width, len(support))
        _check_count(np.prod(np.arange(len(support), len(support) - width, -1), dtype=float))
        masses = {
            candidates: _successive_mass(law, candidates)
            for candidates in itertools.permutations(support, width)
        }
        return cls.explicit(law.size, masses)

    @classmethod
    def mixed(cls, fixed: TokenTuple, q: Vector, width: int) -> "CandidateLaw":
        """Deterministic candidates, then `width` independent draws from q, which gives them no mass."""
        law = check_law("draft law", q)
        check_fixed(fixed, law)
        drawn = cls.iid(law, width)
        return cls(
            num_tokens=law.size,
            tuples=tuple(fixed + candidates for candidates in drawn.tuples),
            probs=drawn.probs,
        )

    @classmethod
    def from_proposal(cls, num_tokens: int, proposal: Proposal) -> "CandidateLaw":
        """The joint law of what a proposal of the core draws.

        Raises:
            LawError: For `Arbitrary` and unknown proposals.
        """
        if isinstance(proposal, Deterministic):
            return cls.deterministic(num_tokens, proposal.token_ids)
        if not (laws := [dense(law, num_tokens) for law in proposal.draft_laws]):
            raise LawError(
                f"candidates: {type(proposal).__name__} has no declared law; list the joint law "
                "with `explicit`"
            )
        if not proposal.may_repeat:
            return cls.without_replacement(laws[0], len(laws))
        if proposal.fixed_ids:
            return cls.mixed(proposal.fixed_ids, laws[0], len(laws))
        return cls.independent(laws)

    def __iter__(self) -> Iterator[tuple[TokenTuple, float]]:
        return zip(self.tuples, self.probs.tolist(), strict=True)

    @property
    def membership(self) -> Bool[np.ndarray, "tuples vocab"]:
        """True for the tokens that a tuple contains."""
        member = np.zeros((len(self.tuples), self.num_tokens), dtype=bool)
        for row, candidates in enumerate(self.tuples):
            member[row, list(candidates)] = True
        return member

    @property
    def inclusion(self) -> Vector:
        """P(token is among the candidates)."""
        return self.probs @ self.membership


def _successive_mass(law: Vector, candidates: TokenTuple) -> float:
    left = law.copy()
    mass = 1.0
    for token in candidates:
        # Summed anew: 1 - (mass drawn so far) would lose every digit of a small rest.
        mass *= float(law[token] / left.sum())
        left[token] = 0.0
    return mass


def _check_count(count: float) -> None:
    if count > MAX_TUPLES:
        raise OptionError(
            f"candidates: {count:.3g} tuples to list, at most {MAX_TUPLES}; take a "
            "smaller vocabulary or width"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransportProblem:
    """Find Y given the candidates t, with law(Y) = p exactly, that maximises P(Y in t).

    This is optimal transport from tuples to tokens with *membership cost*: 1 when the token is not
    among the candidates (SpecTr, Sun et al., arXiv 2310.15141, section 3).

    Args:
        target: p, a mass per token, `[vocab]`.
        candidates: P(t).

    Raises:
        LawError: If p is no law, or target and candidates have different vocabularies.
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
        """Independent candidates, a draw from each draft law."""
        return cls(target=target, candidates=CandidateLaw.independent(draft_laws))

    @classmethod
    def from_joint_law(
        cls, target: Vector, masses: Mapping[TokenTuple, float]
    ) -> "TransportProblem":
        """Candidates with any joint law, listed."""
        return cls(target=target, candidates=CandidateLaw.explicit(target.size, masses))
