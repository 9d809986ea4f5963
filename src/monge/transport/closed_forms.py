"""Acceptance of the published rules, in closed form where one is known.

p = target law, q = draft law, K = `width`. Acceptance is P(the emitted token is among the
candidates), whichever branch emits it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from monge.core.errors import LawError
from monge.transport.laws import check_law, check_pair, check_width

Vector = Float64[np.ndarray, " vocab"]


def naive_tree_acceptance(p: Vector, q: Vector, width: int) -> float:
    """Single-draft step with the first of K independent candidates.

    The residual token may hit one of the others.
    """
    check_width(width)
    p, q = _checked(p, q)
    accepted, residual = _step(p, q)
    return accepted + float(residual @ (1.0 - (1.0 - q) ** (width - 1)))


def rrs_acceptance(p: Vector, draft_laws: Sequence[Vector]) -> float:
    """Recursive rejection of independent candidates, each from its own draft law.

    1 - prod_k (1 - beta_k).

    beta_k = sum(min(P_k, q_k)), P_1 = p, P_{k+1} = (P_k - q_k)_+ normalised. A residual token never
    hits a candidate that was drawn from the same law: rejected tokens have no mass left. Different
    laws keep that, since P only loses support.

    Reference: SpecInfer (arXiv 2305.09781), RSD (arXiv 2402.14160).
    """
    check_width(len(draft_laws))
    rejected, left = 1.0, check_law("target", p)
    for law in draft_laws:
        left, q = _checked(left, law)
        _, residual = _step(left, q)
        mass = float(residual.sum())
        if mass == 0.0:
            return 1.0
        rejected *= mass
        left = residual / mass
    return 1.0 - rejected


def rrs_without_replacement_acceptance(p: Vector, q: Vector, width: int) -> float:
    """Recursive rejection of candidates drawn without replacement, each tested against the law it was drawn from.

    alpha = beta + sum_i (q_i - p_i)_+ alpha'(i), where alpha'(i) is the acceptance of the rest
    against (p - q)_+ and q without i, both normalised: closed form for K = 2, O(support^(K-1)) for
    larger K. Stops with the support of q.

    Reference: RSD-C and RSD-S (arXiv 2402.14160); Sequoia (arXiv 2402.12374).
    """
    check_width(width)
    p, q = _checked(p, q)
    accepted, residual = _step(p, q)
    mass = float(residual.sum())
    if mass == 0.0 or width == 1:
        return accepted
    for token in np.flatnonzero(q > p).tolist():
        rest = q.copy()
        rest[token] = 0.0
        if rest.any():  # else this was the last token of the support
            again = rrs_without_replacement_acceptance(
                residual / mass, rest / rest.sum(), width - 1
            )
            accepted += float(q[token] - p[token]) * again
    return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class KSeqConstants:
    """Constants of K-SEQ, computed once per node.

    Args:
        rho: Divisor of the acceptance ratio, at least the optimal one.
        accepted: Acceptance of K tests, `1 - (1 - beta)^K`; beta is the acceptance of one test.
        gamma: `accepted / beta`, at most rho, so that the residual `p - gamma min(p / rho, q)` is
            non-negative.
    """

    rho: float
    accepted: float
    gamma: float


def k_seq_constants(p: Vector, q: Vector, width: int, rho: float | None = None) -> KSeqConstants:
    """The smallest rho in [1, K] with 1 - (1 - beta(rho))^K <= rho beta(rho), rounded up, and what follows from it.

    Args:
        p: Target law.
        q: Draft law.
        width: K.
        rho: A larger divisor to use instead; every larger one is valid too.

    Raises:
        LawError: If rho is too small, which would make the residual negative.

    Reference: SpecTr (arXiv 2310.15141, Algorithm 2).
    """
    check_width(width)
    p, q = _checked(p, q)
    if rho is not None:
        constants = _k_seq_at(p, q, width, rho)
        if constants.gamma > rho:
            raise LawError(
                f"k-seq: rho = {rho} is below gamma = {constants.gamma}, so the "
                "residual would be negative"
            )
        return constants
    low, high = 1.0, float(width)
    constants = _k_seq_at(p, q, width, low)
    if constants.gamma <= low:
        return constants
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return _k_seq_at(p, q, width, high)
        if _k_seq_at(p, q, width, middle).gamma <= middle:
            high = middle
        else:
            low = middle


def k_seq_acceptance(p: Vector, q: Vector, width: int, rho: float | None = None) -> float:
    """K-SEQ with residual tokens that coincide with a candidate, which the bound of the paper leaves out.

    alpha = accepted + (1 - accepted) sum_t res_t (1 - (1 - r_t)^K), where r = (q - p / rho)_+ / (1
    - beta) is the law of a candidate that was rejected. At the smallest rho, gamma = rho and no
    residual token can be a rejected one; at a larger rho the hits count.
    """
    p, q = _checked(p, q)
    constants = k_seq_constants(p, q, width, rho)
    residual = np.maximum(p - constants.gamma * np.minimum(p / constants.rho, q), 0.0)
    rejected_law = np.maximum(q - p / constants.rho, 0.0)
    if not (residual.any() and rejected_law.any()):
        return constants.accepted
    rejected_law = rejected_law / rejected_law.sum()
    hits = 1.0 - (1.0 - rejected_law) ** width
    return constants.accepted + (1.0 - constants.accepted) * float(residual @ hits / residual.sum())


def _k_seq_at(p: Vector, q: Vector, width: int, rho: float) -> KSeqConstants:
    beta = min(1.0, float(np.minimum(p / rho, q).sum()))
    accepted = 1.0 if beta == 1.0 else -float(np.expm1(width * np.log1p(-beta)))
    # Disjoint supports: nothing is ever accepted, and any gamma leaves the residual at p.
    gamma = accepted / beta if beta > 0.0 else 1.0
    return KSeqConstants(rho=rho, accepted=accepted, gamma=gamma)


def _step(p: Vector, q: Vector) -> tuple[float, Vector]:
    """Acceptance of a single-draft step, and the unnormalised residual."""
    return float(np.minimum(p, q).sum()), np.maximum(p - q, 0.0)


def _checked(p: Vector, q: Vector) -> tuple[Vector, Vector]:
    p, q = check_law("target", p), check_law("draft law", q)
    check_pair(p, q)
    return p, q
