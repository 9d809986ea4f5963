"""Perplexity and distances between next-token distributions, text by text.

In the maths p = the network, q = the network with rounded weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextQuality:
    """Sums over the read tokens of one text.

    Args:
        num_tokens: Tokens that were predicted.
        nats: Negative log-probability that p gives them.
        rounded_nats: The same of q.
        divergence: KL(p || q) in nats.
        variation: Total variation of p and q.
        num_equal: Places where p and q have the same most probable token.
    """

    num_tokens: int
    nats: float
    rounded_nats: float
    divergence: float
    variation: float
    num_equal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tokens, and its standard error from the spread between texts."""

    mean: float
    error: float


def text_quality(logits: Tensor, rounded: Tensor, token_ids: Tensor) -> TextQuality:
    """Compare two rows of logits at every token of a text but the last.

    Args:
        logits: Of the network, `[seq, vocab]`.
        rounded: Of the network with rounded weights, `[seq, vocab]`.
        token_ids: The text, `[seq]`.
    """
    log_p, log_q = (one[:-1].double().log_softmax(dim=-1) for one in (logits, rounded))
    p, following = log_p.exp(), token_ids[1:, None]
    return TextQuality(
        num_tokens=len(following),
        nats=-float(log_p.gather(1, following).sum()),
        rounded_nats=-float(log_q.gather(1, following).sum()),
        divergence=float((p * (log_p - log_q)).sum()),
        variation=float((p - log_q.exp()).abs().sum()) / 2,
        num_equal=int((log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum()),
    )


def compare(
    network: Any,  # noqa: ANN401 (the host's network)
    rounded: Any,  # noqa: ANN401
    texts: Sequence[Sequence[int]],
    on_texts: Callable[[int], None] = lambda count: None,
) -> list[TextQuality]:
    """Let both networks read the texts.

    Args:
        network: The network.
        rounded: The network with rounded weights.
        texts: Token ids; those of a single token are left out.
        on_texts: Told how many texts were read.
    """
    found: list[TextQuality] = []
    for text in texts:
        if len(text) > 1:
            ids = torch.tensor([text])
            with torch.inference_mode():
                logits, others = (
                    one(input_ids=ids, use_cache=False).logits[0] for one in (network, rounded)
                )
            found.append(text_quality(logits, others, ids[0]))
        on_texts(1)
    return found


def summary(texts: Sequence[TextQuality]) -> dict[str, Estimate]:
    """Perplexities, their ratio, and means over all tokens.

    The standard error of a ratio of sums over texts (delta method; Cochran, Sampling Techniques,
    section 6.3). That of a perplexity is the perplexity times the error of its logarithm.
    """
    sizes = [one.num_tokens for one in texts]
    total, count = sum(sizes), len(sizes)

    def mean(sums: list[float]) -> Estimate:
        value = math.fsum(sums) / total
        squares = [(one - value * size) ** 2 for one, size in zip(sums, sizes, strict=True)]
        spread = math.fsum(squares) * count / (count - 1) if count > 1 else math.nan
        return Estimate(mean=value, error=spread**0.5 / total)

    def exponential(of: Estimate) -> Estimate:
        value = math.exp(of.mean)
        return Estimate(mean=value, error=value * of.error)

    return {
        "perplexity": exponential(mean([one.rounded_nats for one in texts])),
        "perplexity_of_network": exponential(mean([one.nats for one in texts])),
        "perplexity_ratio": exponential(mean([one.rounded_nats - one.nats for one in texts])),
        "divergence": mean([one.divergence for one in texts]),
        "variation": mean([one.variation for one in texts]),
        "equal_argmax": mean([float(one.num_equal) for one in texts]),
    }
