"""A chain of single drafts, decided at once. The plain twins are the walk of `SingleDraft`, and `Block`.

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
    accepted = _run_of(uniforms[:-1] < _ratios(p, q, tokens))
    position = uniforms.index_select(0, (accepted + 1).clamp_max(len(tokens)))
    return accepted, _drawn_after(p, q, accepted, torch.ones_like(p[0, :1]), position)


def decide_block(
    p: Float64[Tensor, "nodes vocab"],
    q: Float64[Tensor, "drafts vocab"],
    tokens: Int64[Tensor, " drafts"],
    uniforms: Float64[Tensor, " nodes"],
) -> tuple[One, One]:
    """Decide from the end of the chain how much of it is accepted; then draw from what `a p` has beyond q.

    Args:
        p: Laws at the root and after every token.
        q: Laws that the tokens were drawn from.
        tokens: The chain.
        uniforms: One a test, from the last token up, and one for the draw that ends the round.

    Returns:
        How many tokens are accepted, and the token after them.

    Reference:
        As `Block`.
    """
    depth, ratios = len(tokens), _ratios(p, q, tokens)
    scales = [torch.ones_like(ratios[:1])]
    for level in range(depth):
        scales.append((scales[-1] * ratios[level : level + 1]).clamp_max(1.0))
    weights = torch.cat(scales)
    masses = (weights[:-1, None] * p[:-1] - q).clamp_min(0.0).sum(1)
    undecided = masses + (1.0 - weights[:-1])
    shares = torch.where(undecided > 0.0, masses / undecided, 0.0)
    from_the_end = torch.cat([shares[1:], weights[-1:]]).flip(0)
    refused = _run_of(uniforms[:-1] >= from_the_end)
    accepted = depth - refused
    position = uniforms.index_select(0, (refused + 1).clamp_max(depth))
    return accepted, _drawn_after(p, q, accepted, weights.index_select(0, accepted), position)


def _ratios(p: Tensor, q: Tensor, tokens: Tensor) -> Float64[Tensor, " drafts"]:
    at = tokens[:, None]
    return (p[:-1].gather(1, at) / q.gather(1, at))[:, 0]


def _drawn_after(p: Tensor, q: Tensor, accepted: One, scale: Float64[Tensor, " 1"], position: Float64[Tensor, " 1"]) -> One:
    """The token after the accepted ones: of what the scaled target has beyond q, or of the target after the last token."""
    own = p.index_select(0, accepted)[0]
    against = torch.cat([q, torch.zeros_like(q[:1])]).index_select(0, accepted)[0]
    left = (scale * own - against).clamp_min(0.0)
    # After the last token nothing was refused; and where rounding leaves nothing, p equals q.
    is_residual = (accepted < len(q)) & (left.sum() > 0.0)
    return drawn(torch.where(is_residual, left / left.sum(), own), position)


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


def _num_block_uniforms(num_accepted: int, num_tokens: int) -> int:
    """A test a token from the end up to the accepted one, and a draw."""
    return min(num_tokens - num_accepted + 1, num_tokens) + 1


BLOCK: Final = ChainDecision(of_laws=decide_block, of_points=decide_points, num_uniforms=_num_block_uniforms)
