"""Log-probabilities of committed tokens, for those who ask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.law import Law

LogprobSource = Literal["processed", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and how probable it was.

    Args:
        token_id: The token.
        logprob: Its log-probability, natural; -inf where the law gives it nothing.
        rank: 1 for the most probable token, and so on; equals share the better rank.
        top: The most probable tokens with their log-probabilities, largest first, among equals the lower id; tokens without
            mass are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def of_law(law: Law, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities under a law."""
    sparse = law.sparse()
    prob = law.prob(token_id)
    order = torch.sort(sparse.probs, descending=True, stable=True).indices[:num_top]
    pairs = zip(sparse.token_ids[order].tolist(), sparse.probs[order].log().tolist(), strict=True)
    return TokenLogprob(
        token_id=token_id,
        logprob=math.log(prob) if prob > 0 else -math.inf,
        rank=1 + int((sparse.probs > prob).sum()),
        top=tuple(pairs),
    )


def of_logits(logits: Float[Tensor, "nodes vocab"], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities under the laws of logits at temperature 1: token i under row i."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    own = logprobs[range(len(token_ids)), list(token_ids)]
    ranks = 1 + (logprobs > own[:, None]).sum(dim=-1)
    values, tokens = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    best = zip(tokens[:, :num_top].tolist(), values[:, :num_top].tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=tuple(pair for pair in zip(*row, strict=True) if pair[1] > -math.inf),
        )
        for token, logprob, rank, row in zip(token_ids, own.tolist(), ranks.tolist(), best, strict=True)
    )
