"""Couplings: an accepted flow, and everything that follows from it by completion."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.core.errors import LawError
from monge.transport.candidates import TransportProblem
from monge.transport.laws import Vector

FLOW_TOLERANCE: Final = 1e-12
"""Largest excess of a flow over P(t) or p that counts as rounding of its sums; a larger excess raises.

Clipping it changes the output law by at most this much per token.
"""

LOSSLESS_TOLERANCE: Final = 1e-12
"""Largest law error that rounding explains.

Sums of at most a few hundred thousand products of numbers below 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coupling:
    """A lossless acceptance rule for a node, in the form of *relaxed transport and completion*.

    Accept candidate i of the tuple t with probability S(i, t) / P(t); otherwise emit from the
    residual, proportional to p - y, where y_i = sum_t S(i, t). The mass not accepted and the mass
    of the residual are both 1 - sum(y), so the output law is p for *every* flow with S(i, t) = 0
    for i not in t, sum_i S(i, t) <= P(t) and y <= p, optimal or not.

    Args:
        problem: Target law and candidates.
        flow: S, a row per tuple, `[tuples, vocab]`.

    Raises:
        LawError: If the flow is not feasible.
    """

    problem: TransportProblem
    flow: Float64[np.ndarray, "tuples vocab"]

    def __post_init__(self) -> None:
        candidates = self.problem.candidates
        expected = (len(candidates.tuples), candidates.num_tokens)
        if self.flow.shape != expected:
            raise LawError(
                f"flow: expected shape {expected} (tuples, vocab); got {self.flow.shape}"
            )
        if not (self.flow >= 0.0).all():  # NaN fails
            raise LawError(
                f"flow: masses must be non-negative; the smallest is {self.flow.min():.6g}"
            )
        strange = np.argwhere((self.flow > 0.0) & ~candidates.membership)
        if strange.size:
            row, token = strange[0].tolist()
            raise LawError(
                f"flow: accepts token {token}, which is not among the candidates "
                f"{candidates.tuples[row]}"
            )
        _check_below("tuple", self.flow.sum(axis=1), candidates.probs)
        _check_below("token", self.accepted_masses, self.problem.target)

    @classmethod
    def from_kernel(
        cls, problem: TransportProblem, kernel: Float64[np.ndarray, "tuples vocab"]
    ) -> "Coupling":
        """The coupling that accepts i from t with probability pi(i | t), completed so that the output law is p."""
        return cls(problem=problem, flow=problem.candidates.probs[:, None] * kernel)

    @property
    def kernel(self) -> Float64[np.ndarray, "tuples vocab"]:
        """Kernel pi(i | t): probability that candidate i of the tuple t is accepted."""
        return self.flow / self.problem.candidates.probs[:, None]

    @property
    def accepted_masses(self) -> Vector:
        """Vector y: mass of every token that is accepted as a candidate."""
        return self.flow.sum(axis=0)

    @property
    def residual(self) -> Vector:
        """The rest of the target, p - y, not normalised."""
        return np.maximum(self.problem.target - self.accepted_masses, 0.0)

    @property
    def residual_law(self) -> Vector:
        """Law of the token after a rejection.

        P itself where nothing is left, since then nothing is ever rejected.
        """
        residual = self.residual
        mass = residual.sum()
        return residual / mass if mass > 0.0 else self.problem.target

    @property
    def conditional_laws(self) -> Float64[np.ndarray, "tuples vocab"]:
        """Law of the emitted token given each tuple."""
        kernel = self.kernel
        rejected = np.maximum(1.0 - kernel.sum(axis=1), 0.0)
        return kernel + rejected[:, None] * self.residual_law

    @property
    def accepted_mass(self) -> float:
        """sum(y): probability that a candidate is accepted *by the flow*."""
        return float(self.flow.sum())

    @property
    def acceptance(self) -> float:
        """P(Y in t): the flow, and the residual tokens that happen to be among the candidates."""
        laws = np.where(self.problem.candidates.membership, self.conditional_laws, 0.0)
        return float(self.problem.candidates.probs @ laws.sum(axis=1))

    @property
    def output_law(self) -> Vector:
        """Law of the emitted token."""
        return self.problem.candidates.probs @ self.conditional_laws

    @property
    def law_error(self) -> float:
        """Largest absolute difference between output law and target."""
        return float(np.abs(self.output_law - self.problem.target).max())

    @property
    def is_lossless(self) -> bool:
        """True if the output law is the target's, up to rounding."""
        return self.law_error <= LOSSLESS_TOLERANCE


def _check_below(
    kind: str, masses: Float64[np.ndarray, " n"], limits: Float64[np.ndarray, " n"]
) -> None:
    excess = masses - limits
    worst = int(excess.argmax())
    if excess[worst] > FLOW_TOLERANCE:
        raise LawError(
            f"flow: {kind} {worst} carries {masses[worst]:.12g}, more than its mass "
            f"{limits[worst]:.12g}"
        )
