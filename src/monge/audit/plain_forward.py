"""Logits of a text, computed again: by a plain forward in float64, or as plain decoding computes them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.model import SequenceModel
from monge.engine.follow import logits_along
from monge.engine.models.network_facts import chooses_logits

Forward = Callable[[tuple[int, ...], int], Float64[Tensor, "nodes vocab"]]
"""`(text, first)` -> the next-token logits after `text[:first + 1]`, ..., after the whole text."""


def plain_forward(network: PreTrainedModel) -> Forward:
    """Return the forward of a float64 copy of a network: one text, one pass, no cache.

    Some networks compute norms in float32 whatever their type is; the result is then as exact as
    that.

    Args:
        network: In evaluation mode; it is left as it is.
    """
    copied: Any = copy.deepcopy(network)
    exact = copied.to(device="cpu", dtype=torch.float64).eval()
    chooses = chooses_logits(exact)

    def forward(token_ids: tuple[int, ...], first: int) -> Tensor:
        keep = {"logits_to_keep": len(token_ids) - first} if chooses else {}
        with torch.inference_mode():
            logits = exact(torch.tensor([token_ids]), use_cache=False, **keep).logits[0]
        return logits[-(len(token_ids) - first) :].double()

    return forward


_PIECE = 64  # tokens


def backend_forward(model: SequenceModel) -> Forward:
    """Return the forward of a model with rounded weights, whose logits depend on the text alone.

    Rounding to 8 bits is no continuous function, so a forward in float64 is no reference for it.

    Args:
        model: The model; nothing else may use it meanwhile.
    """

    def forward(token_ids: tuple[int, ...], first: int) -> Tensor:
        pieces = logits_along(model, token_ids, first, piece=_PIECE)
        return torch.cat([logits.double() for logits in pieces])

    return forward
