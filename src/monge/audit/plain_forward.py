"""Logits of a text by a plain forward in float64, without any of the engine's caches."""

import copy
from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor
from transformers import PreTrainedModel

from monge.engine.models.network_facts import chooses_logits

Forward = Callable[[tuple[int, ...], int], Float64[Tensor, "nodes vocab"]]
"""`(text, first)` -> the next-token logits after `text[:first + 1]`, ..., after the whole text."""


def plain_forward(network: PreTrainedModel) -> Forward:
    """The forward of a float64 copy of a network: one text, one pass, no cache.

    Some networks compute norms in float32 whatever their type is; the result is then as exact as
    that.

    Args:
        network: In evaluation mode; it is left as it is.
    """
    exact = copy.deepcopy(network).eval()
    torch.nn.Module.to(exact, device="cpu", dtype=torch.float64)
    chooses = chooses_logits(exact)

    def forward(token_ids: tuple[int, ...], first: int) -> Tensor:
        keep = {"logits_to_keep": len(token_ids) - first} if chooses else {}
        with torch.inference_mode():
            logits = exact(torch.tensor([token_ids]), use_cache=False, **keep).logits[0]
        return logits[-(len(token_ids) - first) :].double()

    return forward
