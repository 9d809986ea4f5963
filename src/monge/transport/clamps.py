"""The water line of a ratio: the flattest law between a target and a multiple of the draft law.

p = target (sub-)law, q = draft law, both over the support of q in the order that is stated.
"""

import numpy as np
from jaxtyping import Float64


def ceiling(
    p: Float64[np.ndarray, " support"], q: Float64[np.ndarray, " support"], total: float
) -> float:
    """The mu with `sum(min(p, mu q)) = total`, tokens by *decreasing* p/q.

    The largest ratio where total is sum(p).
    """
    return _line(p, q, total, rising=False)


def floor(
    p: Float64[np.ndarray, " support"], q: Float64[np.ndarray, " support"], total: float
) -> float:
    """The lambda with `sum(max(p, lambda q)) = total`, tokens by *increasing* p/q.

    The smallest ratio where total is sum(p).
    """
    return _line(p, q, total, rising=True)


def _line(
    p: Float64[np.ndarray, " n"], q: Float64[np.ndarray, " n"], total: float, *, rising: bool
) -> float:
    # With the line at the k-th ratio, the tokens before it are on the line and the others keep p:
    # both sums are monotone in k.
    ratios = p / q
    on_line = np.concatenate([[0.0], np.cumsum(q)])
    kept = np.concatenate([np.cumsum(p[::-1])[::-1], [0.0]])
    sums = ratios * on_line[:-1] + kept[:-1]
    count = int(np.count_nonzero(sums < total)) if rising else int(np.count_nonzero(sums > total))
    if count == 0:
        return float(ratios[0])
    line = (total - kept[count]) / on_line[count]
    # The line lies between two neighbouring ratios; rounding of a difference over a tiny sum may
    # not carry it outside.
    nearest, next_one = (
        float(ratios[count - 1]),
        float(ratios[count]) if count < q.size else float(line),
    )
    return float(np.clip(line, min(nearest, next_one), max(nearest, next_one)))
