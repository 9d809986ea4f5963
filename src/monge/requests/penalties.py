"""A logits processor for penalties on tokens of the text, a logit bias, and a least length."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from monge.core.errors import OptionError
from monge.core.setting_types import is_of
from monge.requests.processors import Processor, Stateless


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    """Applies a bias, then repetition, frequency and presence penalties, then the least length, as vLLM does.

    Args:
        num_prompt_tokens: Tokens at the start of the text, which count for repetition only.
        vocab_size: Number of tokens of the target.
        min_tokens: Tokens of the completion before any of `end_ids` may come.
        end_ids: Tokens that end the text.
        logit_bias: What is added to logits, by token id.
        repetition_penalty: Divides positive logits of tokens that the text holds, and multiplies
            negative logits; 1 does nothing.
        presence_penalty: Taken off the logits of tokens that the completion holds.
        frequency_penalty: Taken off them for every occurrence.

    Raises:
        OptionError: If a token is not in the vocabulary, or a number cannot be used.

    Reference:
        Repetition: Keskar et al., arXiv 1909.05858, section 4.1, in the form that `transformers` and
        vLLM give it. Presence and frequency: the OpenAI API.
    """

    num_prompt_tokens: int
    vocab_size: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float | int] | None = None
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    # No row of the vocabulary: thousands of requests may wait.
    _biased: Tensor = field(init=False)
    _bias: Tensor = field(init=False)

    def __post_init__(self) -> None:
        bias = self.logit_bias or {}
        for token, value in bias.items():
            if not (is_of(token, int) and 0 <= token < self.vocab_size):
                raise OptionError(
                    f"logit_bias: token ids must lie in 0..{self.vocab_size - 1}; got {token!r}"
                )
            if not (is_of(value, float) and isfinite(value)):
                raise OptionError(
                    f"logit_bias: a bias must be a finite number; got {value!r} for token {token}"
                )
        if not self.repetition_penalty > 0:
            raise OptionError(
                f"repetition_penalty must be positive (1 = none); got {self.repetition_penalty}"
            )
        object.__setattr__(self, "_biased", torch.tensor(list(bias), dtype=torch.long))
        object.__setattr__(
            self, "_bias", torch.tensor([[float(amount) for amount in bias.values()]])
        )

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        written = token_ids[:, self.num_prompt_tokens :]
        if self.logit_bias:
            bias = self._bias.to(scores.device, scores.dtype).expand(len(scores), -1)
            scores = scores.index_add(1, self._biased.to(scores.device), bias)
        if self.repetition_penalty != 1:
            seen = scores.gather(1, token_ids)
            smaller = torch.where(
                seen > 0, seen / self.repetition_penalty, seen * self.repetition_penalty
            )
            scores = scores.scatter(1, token_ids, smaller)
        if self.presence_penalty != 0 or self.frequency_penalty != 0:
            counts = torch.zeros_like(scores).scatter_add(
                1, written, torch.ones_like(written, dtype=scores.dtype)
            )
            once = (counts > 0).to(scores.dtype)
            scores = scores - self.frequency_penalty * counts - self.presence_penalty * once
        if self.end_ids and written.shape[1] < self.min_tokens:
            ends = torch.tensor(sorted(self.end_ids)).to(scores.device, non_blocking=True)
            scores = scores.index_fill(1, ends, -torch.inf)
        return scores


def text_processors(
    num_prompt_tokens: int, vocab_size: int, **settings: Any
) -> tuple[Processor, ...]:
    """Return the processor of some options, see `Penalties`; nothing where all are neutral.

    Raises:
        OptionError: If a value cannot be used.
    """
    penalties = Penalties(num_prompt_tokens=num_prompt_tokens, vocab_size=vocab_size, **settings)
    is_needed = (
        bool(penalties.logit_bias)
        or bool(penalties.min_tokens and penalties.end_ids)
        or penalties.repetition_penalty != 1
        or penalties.presence_penalty != 0
        or penalties.frequency_penalty != 0
    )
    return (Stateless(penalties),) if is_needed else ()
