"""A chain of single drafts, decided at once. The plain twin is the walk of `SingleDraft`.

p = target law, q = draft law.
"""

from typing import Final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.tensor_laws import drawn
from monge.verify.chain_decision import ChainDecision

One = Int64[Tensor, " 1"]


def decide_chain(
    p: Float64[Tensor, "nodes vocab"],
    q: Float64[Tensor, "drafts vocab"],
    tokens: Int64[Tensor, " drafts"],
    uniforms: Float64[Tensor, " nodes"],
) -> tuple[One, One]:
    """Accept token after token with probability `min(1, p_x / q_x)`; after the first refusal draw from what p has beyond q.

    Args:
        p: Laws at the root and after every token.
        q: Laws that the tokens were drawn from.
        tokens: The chain.
        uniforms: One a test, and one for the draw that ends the round.

    Returns:
        How many tokens are accepted, and the token after them.

    Reference:
        As `SingleDraft`.
    """
    at = tokens[:, None]
    ratios = (p[:-1].gather(1, at) / q.gather(1, at))[:, 0]
    accepted = _run_of(uniforms[:-1] < ratios)
    own = p.index_select(0, accepted)[0]
    against = torch.cat([q, torch.zeros_like(q[:1])]).index_select(0, accepted)[0]
    left = (own - against).clamp_min(0.0)
    # After the last token nothing was refused; and where rounding leaves nothing, p equals q.
    is_residual = (accepted < len(tokens)) & (left.sum() > 0.0)
    position = uniforms.index_select(0, (accepted + 1).clamp_max(len(tokens)))
    return accepted, drawn(torch.where(is_residual, left / left.sum(), own), position)


def decide_points(p: Int64[Tensor, " nodes"], tokens: Int64[Tensor, " drafts"]) -> tuple[One, One]:
    """`decide_chain` for point masses at `p` and at `tokens`."""
    accepted = _run_of(p[:-1] == tokens)
    return accepted, p.index_select(0, accepted)


def _num_uniforms(num_accepted: int, num_tokens: int) -> int:
    """A test a token up to the refused one, and a draw."""
    return min(num_accepted + 1, num_tokens) + 1


def _run_of(passed: Tensor) -> One:
    """How many come before the first that did not pass."""
    return passed.long().cumprod(0).sum()[None]


SINGLE_DRAFT: Final = ChainDecision(of_laws=decide_chain, of_points=decide_points, num_uniforms=_num_uniforms)
