"""Log-probabilities of committed tokens, for those who ask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError
from monge.core.law import Law, LawSequence

LogprobSource = Literal["processed", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """The log-probabilities that a request wants.

    Args:
        num_top: So many of the most probable tokens beside the token itself.
        source: `processed`, the law that the token was drawn from, or `raw`, the target's own at
            temperature 1, before processors and sampling rules.
    """

    num_top: int
    source: LogprobSource = "processed"

    def __post_init__(self) -> None:
        if self.num_top < 0:
            raise OptionError(
                f"logprobs: the number of most probable tokens must be >= 0; got {self.num_top}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and how probable it was.

    Args:
        token_id: The token.
        logprob: Its log-probability, natural; -inf where the law gives it nothing.
        rank: 1 for the most probable token, and so on; equals share the better rank.
        top: The most probable tokens with their log-probabilities, largest first; tokens without
            mass are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def along(
    options: LogprobOptions,
    laws: LawSequence,
    logits: Float[Tensor, "nodes vocab"],
    path: Sequence[int],
    token_ids: Sequence[int],
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of the tokens that follow a path's nodes, one by one."""
    if options.source == "raw":
        return of_logits(logits[list(path)], token_ids, options.num_top)
    return tuple(
        of_law(laws[node], token, options.num_top)
        for node, token in zip(path, token_ids, strict=True)
    )


def of_law(law: Law, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities under a law."""
    sparse, prob = law.sparse(), law.prob(token_id)
    best = torch.topk(sparse.probs, min(num_top, len(sparse.probs)))
    pairs = zip(sparse.token_ids[best.indices].tolist(), best.values.log().tolist(), strict=True)
    return TokenLogprob(
        token_id=token_id,
        logprob=math.log(prob) if prob > 0 else -math.inf,
        rank=1 + int((sparse.probs > prob).sum()),
        top=tuple(pairs),
    )


def of_logits(
    logits: Float[Tensor, "nodes vocab"], token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities under the laws of logits at temperature 1: token i under row i."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs[range(len(token_ids)), list(token_ids)]
    ranks = 1 + (logprobs > chosen[:, None]).sum(dim=-1)
    values, tokens = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    best = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=tuple(pair for pair in zip(*row, strict=True) if pair[1] > -math.inf),
        )
        for token, logprob, rank, row in zip(
            token_ids, chosen.tolist(), ranks.tolist(), best, strict=True
        )
    )
