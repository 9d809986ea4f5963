"""Tokens at positions of laws, as tensors: what is drawn is a function of uniforms."""

from typing import Final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

_LARGE: Final = 8192
"""Vocabulary whose running sum takes a device longer than a few more launches."""
_BLOCK: Final = 512


def independent(
    probs: Float64[Tensor, "nodes vocab"], positions: Float64[Tensor, "nodes width"]
) -> Int64[Tensor, "nodes width"]:
    """Return the tokens whose cumulative intervals cover positions in [0, 1): independent draws.

    Args:
        probs: Laws, normalised or not.
        positions: Uniforms.

    Returns:
        Tokens, never a token of mass zero; -1 where a law is NaN or a position is at least 1.
    """
    if not probs.is_cpu and probs.shape[1] >= _LARGE:
        return in_blocks(probs, positions)
    sums = probs.cumsum(1)
    wanted = positions * sums[:, -1:]
    tokens = torch.searchsorted(sums, wanted, right=True)
    return torch.where(wanted < sums[:, -1:], tokens, -1)


def in_blocks(
    probs: Float64[Tensor, "nodes vocab"], positions: Float64[Tensor, "nodes width"]
) -> Int64[Tensor, "nodes width"]:
    """`independent` by sums of blocks, and running sums within a block.

    A device adds up a large vocabulary number by number. Rounding differs, so a position that close
    to a boundary may give the neighbouring token.
    """
    blocks = pad(probs, (0, -probs.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(2).cumsum(1)
    wanted = positions * sums[:, -1:]
    block = torch.searchsorted(sums, wanted, right=True).clamp_max(sums.shape[1] - 1)
    before = pad(sums, (1, 0)).gather(1, block)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).cumsum(2)
    left = (wanted - before)[:, :, None]
    place = torch.searchsorted(inner, left, right=True)
    # The two sums of a block are rounded differently: what lies behind both is its last token.
    last = torch.searchsorted(inner, inner[:, :, -1:].contiguous())
    tokens = block * _BLOCK + torch.minimum(place, last).squeeze(2)
    return torch.where(wanted < sums[:, -1:], tokens, -1)


def without_replacement(
    probs: Float64[Tensor, "nodes vocab"], positions: Float64[Tensor, "nodes width"]
) -> Int64[Tensor, "nodes width"]:
    """Return draws, each from the law without those before it; -1 where nothing is left of the law."""
    tokens = list[Tensor]()
    for place in range(positions.shape[1]):
        token = independent(probs, positions[:, place, None])
        tokens.append(token)
        if place + 1 < positions.shape[1]:
            probs = probs.scatter(1, token.clamp_min(0), 0.0)
            probs = probs / probs.sum(1, keepdim=True)
    return torch.cat(tokens, 1)
