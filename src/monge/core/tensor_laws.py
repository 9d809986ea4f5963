"""Laws of several nodes as one tensor, and draws from them, by operations that the host need not wait for.

The plain twins are `law_from_logits`, without truncation, and `Law.quantile`.
"""

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor


def tempered_laws(logits: Float[Tensor, "nodes vocab"], temperature: Float64[Tensor, " 1"]) -> Float64[Tensor, "nodes vocab"]:
    """The laws proportional to `exp(logits / temperature)`; NaN where logits make no law.

    Args:
        logits: In any float type.
        temperature: Positive.
    """
    # Shifted first: a temperature of 1e-300 must give the point mass, not inf - inf.
    weights = ((logits.double() - logits.amax(-1, keepdim=True).double()) / temperature).exp()
    return weights / weights.sum(-1, keepdim=True)


def make_laws(laws: Float64[Tensor, "nodes vocab"]) -> Bool[Tensor, ""]:
    """Whether all rows that `tempered_laws` gave are laws: one bad logit makes every mass of its row NaN."""
    return ~laws[:, 0].isnan().any()


def drawn(law: Float64[Tensor, " vocab"], position: Float64[Tensor, " 1"]) -> Int64[Tensor, " 1"]:
    """Token whose cumulative interval covers a position in [0, 1); some token where there is no law."""
    cumulative = law.cumsum(0)
    # Scaled by the rounded total, so that the last positive mass covers every position below one.
    place = torch.searchsorted(cumulative, position * cumulative[-1:], right=True)
    return place.clamp_max(law.shape[0] - 1)


def largest(logits: Float[Tensor, "nodes vocab"]) -> Int64[Tensor, " nodes"]:
    """The first place where each row's largest logit stands; some place where one is NaN."""
    size = logits.shape[1]
    places = torch.arange(size, device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), places, size).amin(-1).clamp_max(size - 1)
