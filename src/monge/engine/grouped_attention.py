"""Attention for networks whose heads share keys, as fast backends trace it."""

from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

_NAME: Final = "monge_grouped"


def attend_in_groups(network: PreTrainedModel) -> None:
    """Let a network that runs `sdpa` attend without copies of its keys and values."""
    AttentionInterface.register(_NAME, _grouped_attention)
    network.set_attn_implementation(_NAME)


def _grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The host's `sdpa` without its copies of keys and values: heads that share keys are further queries of one head.

    The few queries are scaled here: a backend that takes attention apart would scale all keys.
    """
    batch, heads, nodes, size = query.shape
    shared = key.shape[1]
    scaled = query * (size**-0.5 if scaling is None else scaling)
    queries = scaled.reshape(batch, shared, heads // shared * nodes, size)
    mask = attention_mask.repeat(1, 1, heads // shared, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=1.0)
    return attended.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None
