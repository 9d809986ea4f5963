"""The optimum in closed form: minimum cuts of the flow from candidates to tokens.

p = target law, q = draft law, K = `width`. For any joint law of the candidates, with Q(H) = P(all
candidates lie in H),

    alpha* = 1 + min over H of [ p(H) - Q(H) ]
    (cut)

(max-flow/min-cut; Hu et al., arXiv 2502.18779, through the unimodular dual). Where Q is q-convex,
as for independent draws and draws without replacement, a minimising H is a prefix of the tokens
sorted by increasing p/q.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from monge.transport.candidates import TokenTuple
from monge.transport.laws import (
    Tabular,
    Vector,
    by_ratio,
    check_fixed,
    check_law,
    check_pair,
    check_sub_law,
    check_width,
    checked_pair,
)
from monge.transport.race import prefix_containment
from monge.transport.random_tree import string_laws

DRAFTS_ROUNDING: Final = 1e-12
"""Relative rounding by which log p(H) / log q(H) may lie above a whole number and still count as that number.

With K draws fewer by this share of K, q(H)^K changes by less than 1e-12, because x log(1/x) < 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A minimum cut.

    Args:
        acceptance: alpha*, the largest P(Y in t) of a lossless rule.
        tokens: A set H that attains the minimum; if several do, rounding decides which of them.
    """

    acceptance: float
    tokens: TokenTuple


def iid_optimum(p: Vector, q: Vector, width: int) -> Cut:
    """`width` independent draws from q; p may be a sub-target, whose missing mass is never drafted.

    With K = 2 this is Theorem 3 of Khisti et al. (arXiv 2410.18234), for larger K the conjecture
    made there.
    """
    check_width(width)
    tokens, kept, drawn = _prefixes(p, q)
    return _best_prefix(tokens, kept, drawn**width)


def without_replacement_optimum(p: Vector, q: Vector, width: int) -> Cut:
    """`width` draws without replacement.

    Closed form for two, exponential race for more (absolute error below 1e-13).
    """
    check_width(width)
    tokens, kept, _ = _prefixes(p, q)
    return _best_prefix(tokens, kept, prefix_containment(q[tokens], width))


def mixed_optimum(p: Vector, fixed: TokenTuple, q: Vector, width: int) -> Cut:
    """Deterministic candidates D and `width` independent draws from q, which gives D no mass.

    alpha* = p(D) + min over H outside D of [ p(H) + 1 - q(H)^K ].
    """
    p = check_law("target", p)
    check_fixed(fixed, q)
    outside = p.copy()
    outside[list(fixed)] = 0.0
    sampled = iid_optimum(outside, q, width)
    # A tuple always contains D, so Q(H) is zero unless H does, and H then pays p(D): the minimum is
    # over the rest of H.
    tokens = (*fixed, *sampled.tokens) if sampled.tokens else ()
    return Cut(acceptance=float(p[list(fixed)].sum()) + sampled.acceptance, tokens=tokens)


def greedy_proposal(q: Vector, width: int) -> tuple[TokenTuple, Vector | None]:
    """The top `width - 1` tokens of q, and the law of the last candidate.

    Q outside them, or `None` where nothing is left.

    Reference: Hu et al. (arXiv 2502.18779).
    """
    check_width(width)
    q = check_law("draft law", q)
    support = np.flatnonzero(q)
    fixed = support[np.argsort(-q[support], kind="stable")][: width - 1]
    rest = q.copy()
    rest[fixed] = 0.0
    return tuple(fixed.tolist()), rest / rest.sum() if rest.any() else None


def greedy_optimum(p: Vector, q: Vector, width: int) -> Cut:
    """Greedy drafting: the top `width - 1` tokens of q and a draw from the rest, a mixed set with one draw."""
    fixed, rest = greedy_proposal(q, width)
    if rest is None:
        return Cut(acceptance=float(check_law("target", p)[list(fixed)].sum()), tokens=fixed)
    return mixed_optimum(p, fixed, rest, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOne:
    """When some rule accepts one of K independent draws with probability 1.

    Args:
        num_drafts: Smallest K for which it does; `None` where no K is enough.
        tokens: The tightest set H, which requires that K; empty if every K is enough.
    """

    num_drafts: int | None
    tokens: TokenTuple

    def holds(self, width: int) -> bool:
        """Return whether alpha* = 1 for `width` draws."""
        check_width(width)
        return self.num_drafts is not None and self.num_drafts <= width


def acceptance_one(p: Vector, q: Vector) -> AcceptanceOne:
    """The acceptance-one condition for independent draws from q.

    `p(H) >= q(H)^K` for every set H of tokens.

    Equivalently `K >= log p(H) / log q(H)` for every H with q(H) < 1; sets that are prefixes of the
    tokens sorted by increasing p/q suffice. No K is enough where q drafts a token that p never
    emits, or p emits a token that q never drafts.

    Reference:
        Theorem 2 of Khisti et al. (arXiv 2410.18234) for K = 2; the cut gives every K.
    """
    p, q = checked_pair(p, q)
    tokens, _ = by_ratio(p, q)
    never = tokens[p[tokens] == 0.0]
    if never.size or p[q == 0.0].any():
        return AcceptanceOne(
            num_drafts=None, tokens=tuple((never if never.size else tokens).tolist())
        )
    if tokens.size == 1:
        return AcceptanceOne(num_drafts=1, tokens=())
    required = _log_prefixes(p[tokens]) / _log_prefixes(q[tokens])
    size = int(required.argmax())
    least = float(required[size])
    count = max(1, math.ceil(least * (1.0 - DRAFTS_ROUNDING)))
    return AcceptanceOne(
        num_drafts=count, tokens=tuple(sorted(tokens[: size + 1].tolist())) if count > 1 else ()
    )


def layer_bound(target: Tabular, draft: Tabular, *, depth: int, width: int) -> float:
    """Upper bound of E[tau] for `width` independent paths.

    One optimum per layer, over strings instead of tokens.

    E[tau] <= sum over d of ( 1 + min over sets H of strings of length d of [ p_d(H) - q_d(H)^K ] ):
    whatever the verifier does, its accepted prefix of length d is one of the K drafted strings, and
    follows a law dominated by p_d.
    """
    total = 0.0
    for p_law, q_law in zip(
        string_laws(target, depth)[1:], string_laws(draft, depth)[1:], strict=True
    ):
        strings = sorted(p_law.keys() | q_law.keys())
        p, q = (np.array([law.get(string, 0.0) for string in strings]) for law in (p_law, q_law))
        total += iid_optimum(p, q, width).acceptance
    return total


def _prefixes(
    p: Vector, q: Vector
) -> tuple[
    Int64[np.ndarray, " support"], Float64[np.ndarray, " support"], Float64[np.ndarray, " support"]
]:
    """Tokens of the support of q by increasing p/q, with p and q of each prefix.

    The mass q of the whole support is 1.
    """
    p, q = check_sub_law("target", p), check_law("draft law", q)
    check_pair(p, q)
    tokens, _ = by_ratio(p, q)
    drawn = np.cumsum(q[tokens])
    drawn[-1] = 1.0
    return tokens, np.cumsum(p[tokens]), drawn


def _log_prefixes(masses: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n-1"]:
    """Logarithms of the masses of all prefixes but the whole law, to full relative precision near 1, too."""
    heads, tails = np.cumsum(masses)[:-1], np.cumsum(masses[::-1])[-2::-1]
    return np.where(heads < tails, np.log(heads), np.log1p(-tails))


def _best_prefix(
    tokens: Int64[np.ndarray, " support"], kept: np.ndarray, contained: np.ndarray
) -> Cut:
    # The whole support is always contained, and p of it stands alone: 1 + p - 1 would leave
    # rounding where the answer is zero.
    values = np.concatenate([[1.0], 1.0 + (kept - contained)[:-1], kept[-1:]])
    size = int(values.argmin())
    return Cut(acceptance=float(values[size]), tokens=tuple(tokens[:size].tolist()))
