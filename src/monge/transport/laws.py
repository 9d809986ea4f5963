"""Dense laws as numpy vectors: what may enter the theory, and the order in which the optimum reads it.

p = target law, q = draft law.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int64

from monge.core.errors import LawError, OptionError
from monge.laws.law import MASS_TOLERANCE, DenseLaw, Law

Vector = Float64[np.ndarray, " vocab"]

Tabular = Callable[[tuple[int, ...]], Vector]
"""A model given by its table: prefix of tokens -> dense law of the next token."""


def check_law(name: str, probs: Vector) -> Vector:
    """A read-only copy of a vector that is a law.

    Raises:
        LawError: If it is not a non-empty vector of non-negative finite masses that sum to 1. It is
            never renormalised: a law that does not sum to 1 was computed wrongly, and rescaling
            would hide the error.
    """
    law = check_sub_law(name, probs)
    total = float(law.sum())
    if abs(total - 1.0) > MASS_TOLERANCE:
        raise LawError(
            f"{name}: masses must sum to 1; got {total:.12g} over {law.size} tokens; normalise "
            "where the law is made"
        )
    return law


def check_sub_law(name: str, masses: Vector) -> Vector:
    """A read-only copy of a vector of masses that sum to at most 1.

    Raises:
        LawError: If it is anything else.
    """
    law = np.array(masses, dtype=np.float64)
    if law.ndim != 1 or law.size == 0:
        raise LawError(f"{name}: expected one non-empty vector of masses; got shape {law.shape}")
    smallest, total = float(law.min()), float(law.sum())
    if not (smallest >= 0.0 and total <= 1.0 + MASS_TOLERANCE):  # written so that NaN fails
        raise LawError(
            f"{name}: masses must be non-negative and sum to at most 1; got smallest "
            f"{smallest:.6g}, sum {total:.12g}"
        )
    law.setflags(write=False)
    return law


def check_pair(p: Float64[np.ndarray, "..."], q: Float64[np.ndarray, "..."]) -> None:
    """Raises `LawError` unless target and draft law speak about the same tokens."""
    if p.shape != q.shape:
        raise LawError(
            f"target over {p.shape} and draft law over {q.shape} tokens; both must "
            "cover one vocabulary"
        )


def checked_pair(p: Vector, q: Vector) -> tuple[Vector, Vector]:
    """Return read-only copies of a target and a draft law over the same vocabulary; see `check_law`."""
    p, q = check_law("target", p), check_law("draft law", q)
    check_pair(p, q)
    return p, q


def check_width(width: int) -> None:
    """Raises `OptionError` unless there is at least one candidate."""
    if width < 1:
        raise OptionError(f"width: expected at least one candidate; got {width}")


def check_fixed(fixed: tuple[int, ...], q: Vector) -> None:
    """Raises `LawError` unless deterministic candidates are tokens of the vocabulary to which q gives no mass."""
    outside = [token for token in fixed if not 0 <= token < q.size]
    if outside:
        raise LawError(f"fixed candidates {outside} are outside a vocabulary of {q.size}")
    heavy = [token for token in fixed if q[token] > 0]
    if heavy:
        raise LawError(
            f"the sampled law gives mass to fixed candidates {heavy}; remove them and renormalise"
        )


def dense(law: Law, num_tokens: int) -> Vector:
    """The masses of a law of `monge.core`, for each token of the vocabulary.

    Raises:
        LawError: If it gives mass to tokens outside the vocabulary.
    """
    if isinstance(law, DenseLaw) and law.probs.numel() != num_tokens:
        raise LawError(f"draft law over {law.probs.numel()} tokens, target over {num_tokens}")
    part = law.sparse()
    token_ids, masses = part.token_ids.cpu().numpy(), part.probs.cpu().numpy()
    if token_ids[0] < 0 or token_ids[-1] >= num_tokens:
        raise LawError(
            f"draft law: token {max(token_ids[-1], -token_ids[0])} is outside a "
            f"vocabulary of {num_tokens}"
        )
    probs = np.zeros(num_tokens)
    probs[token_ids] = masses
    return probs


def by_ratio(
    p: Vector, q: Vector
) -> tuple[Int64[np.ndarray, " support"], Float64[np.ndarray, " support"]]:
    """Tokens of the support of q by increasing p/q (ties by token), and their ratios.

    Raises:
        LawError: If a draft mass is so small that its ratio overflows.
    """
    tokens = np.flatnonzero(q)
    with np.errstate(over="ignore"):
        ratios = p[tokens] / q[tokens]
    if not np.isfinite(ratios).all():
        worst = int(tokens[np.argmax(ratios)])
        raise LawError(
            f"draft law: mass {q[worst]:.3g} of token {worst} is too small for p/q to "
            "be a float64; set it to zero"
        )
    order = np.argsort(ratios, kind="stable")
    return tokens[order], ratios[order]
