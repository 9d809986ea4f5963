"""Coupling by shared noise: drafter and target run the same race, and agree where it has one winner.

p = target law, q = draft law, K = `width`. For every token i and draft k both sides know a clock
S_i^k, exponential, mean one. Draft k is `X^k = argmin_i S_i^k / q_i`, and the output is `Y =
argmin_i (min_k S_i^k) / p_i`. The smallest of K clocks is a clock of rate K, so Y follows p
exactly; and Y is a function of the clocks and of p alone, whatever the drafter is.
"""

import numpy as np
from jaxtyping import Float64

from monge.transport.laws import check_law, check_pair, check_width


def match_probability(
    p: Float64[np.ndarray, " vocab"], q: Float64[np.ndarray, " vocab"], width: int
) -> float:
    """P(Y = X^k), where k is the draft whose clock made Y the output.

    A lower bound of P(Y is one of the candidates).

    `sum_j K / (sum_i max(q_i / q_j, p_i / p_j) + (K - 1) / p_j)`, over the tokens j that both laws
    can emit. With one candidate it is the acceptance itself, and at least `(1 - TV) / (1 + TV)`.

    Reference:
        Rowan et al., arXiv 2506.05632 (several drafts); Daliri et al., arXiv 2408.07978 (one).
    """
    check_width(width)
    p, q = check_law("target", p), check_law("draft law", q)
    check_pair(p, q)
    both = np.flatnonzero((p > 0.0) & (q > 0.0))
    # Times p_j q_j, so that no ratio overflows: the clocks that j must beat, [both, vocab].
    beaten = np.maximum(np.outer(p[both], q), np.outer(q[both], p)).sum(axis=1)
    return float((width * p[both] * q[both] / (beaten + (width - 1) * q[both])).sum())
