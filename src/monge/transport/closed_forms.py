"""Acceptance of the published rules, in closed form where it is known.

p = target law, q = draft law, K = `width`. Acceptance is P(the emitted token is among the
candidates), whichever branch emits it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monge.core.errors import LawError
from monge.transport.laws import Vector, check_law, check_width, checked_pair


def naive_tree_acceptance(p: Vector, q: Vector, width: int) -> float:
    """Single-draft step with the first of K independent candidates.

    The residual token may hit another candidate.
    """
    check_width(width)
    p, q = checked_pair(p, q)
    accepted, residual = _step(p, q)
    return accepted + float(residual @ (1.0 - (1.0 - q) ** (width - 1)))


def recursive_rejection_acceptance(p: Vector, draft_laws: Sequence[Vector]) -> float:
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
        left, q = checked_pair(left, law)
        _, residual = _step(left, q)
        mass = float(residual.sum())
        if mass == 0.0:
            return 1.0
        rejected *= mass
        left = residual / mass
    return 1.0 - rejected


def recursive_rejection_without_replacement_acceptance(p: Vector, q: Vector, width: int) -> float:
    """Recursive rejection of candidates drawn without replacement, each tested against the law it was drawn from.

    alpha = beta + sum_i (q_i - p_i)_+ alpha'(i), where alpha'(i) is the acceptance of the rest
    against (p - q)_+ and q without i, both normalised: closed form for K = 2, O(support^(K-1)) for
    larger K. Stops with the support of q.

    Reference: RSD-C and RSD-S (arXiv 2402.14160); Sequoia (arXiv 2402.12374).
    """
    check_width(width)
    p, q = checked_pair(p, q)
    accepted, residual = _step(p, q)
    mass = float(residual.sum())
    if mass == 0.0 or width == 1:
        return accepted
    for token in np.flatnonzero(q > p).tolist():
        rest = q.copy()
        rest[token] = 0.0
        if rest.any():  # else this was the last token of the support
            again = recursive_rejection_without_replacement_acceptance(
                residual / mass, rest / rest.sum(), width - 1
            )
            accepted += float(q[token] - p[token]) * again
    return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class KSeqConstants:
    """Constants of K-SEQ, computed once per node.

    Args:
        rho: Divisor of the acceptance ratio, at least the optimal divisor.
        accepted: Acceptance of K tests, `1 - (1 - beta)^K`; beta is the acceptance of a test.
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
        width: Number of draws K.
        rho: A larger divisor to use instead; every larger divisor is valid too.

    Raises:
        LawError: If rho is too small, which would make the residual negative.

    Reference: SpecTr (arXiv 2310.15141, Algorithm 2).
    """
    check_width(width)
    p, q = checked_pair(p, q)
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
    residual token can be a rejected candidate; at a larger rho the hits count.
    """
    p, q = checked_pair(p, q)
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


def match_probability(p: Vector, q: Vector, width: int) -> float:
    """Return P(Y = X^k), k being the draft whose clock made Y the output: a lower bound of the acceptance of `gumbel`.

    Drafter and target run the same race. For every token i and draft k both know a clock S_i^k,
    exponential of mean 1; draft k is `X^k = argmin_i S_i^k / q_i`, and the output is `Y = argmin_i
    (min_k S_i^k) / p_i`, which follows p exactly, and is a function of the clocks and of p alone.

    `sum_j K / (sum_i max(q_i / q_j, p_i / p_j) + (K - 1) / p_j)`, over the tokens j that both laws
    can emit. With one candidate it is the acceptance itself, and at least `(1 - TV) / (1 + TV)`.

    Reference:
        Rowan et al., arXiv 2506.05632 (several drafts); Daliri et al., arXiv 2408.07978 (a single
        draft).
    """
    check_width(width)
    p, q = checked_pair(p, q)
    both = np.flatnonzero((p > 0.0) & (q > 0.0))
    # Times p_j q_j, so that no ratio overflows: the clocks that j must beat, [both, vocab].
    beaten = np.maximum(np.outer(p[both], q), np.outer(q[both], p)).sum(axis=1)
    return float((width * p[both] * q[both] / (beaten + (width - 1) * q[both])).sum())


def _step(p: Vector, q: Vector) -> tuple[float, Vector]:
    """Acceptance of a single-draft step, and the unnormalised residual."""
    return float(np.minimum(p, q).sum()), np.maximum(p - q, 0.0)
