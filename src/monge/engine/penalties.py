"""Logits processors that look at the text.

Penalties on tokens that are there already, and a bias on chosen tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from monge.core.errors import OptionError
from monge.core.setting_types import is_of
from monge.engine.processors import Processor, Stateless


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds a number to the logits of chosen tokens.

    Args:
        bias: What is added, by token id.
        vocab_size: Number of tokens.

    Raises:
        OptionError: If a token is not in the vocabulary.
    """

    bias: Mapping[int, float | int]
    vocab_size: int
    _tokens: Tensor = field(init=False)
    _values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for token, value in self.bias.items():
            if not (is_of(token, int) and 0 <= token < self.vocab_size):
                raise OptionError(
                    f"logit_bias: token ids must lie in 0..{self.vocab_size - 1}; got {token!r}"
                )
            if not (is_of(value, float) and isfinite(value)):
                raise OptionError(
                    f"logit_bias: a bias must be a finite number; got {value!r} for token {token}"
                )
        # No row of the vocabulary: thousands of requests may wait.
        values = torch.tensor([[float(value) for value in self.bias.values()]])
        object.__setattr__(self, "_tokens", torch.tensor(list(self.bias), dtype=torch.long))
        object.__setattr__(self, "_values", values)

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        values = self._values.to(scores.device, scores.dtype).expand(len(scores), -1)
        return scores.index_add(1, self._tokens.to(scores.device), values)


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Divides positive logits of tokens that the prompt or the completion holds by `penalty`, and multiplies negative ones.

    Source: Keskar et al., arXiv 1909.05858, section 4.1, in the form that `transformers` and vLLM
    give it.

    Args:
        penalty: Above 1 discourages repetition; 1 does nothing.
    """

    penalty: float | int

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise OptionError(f"repetition_penalty must be positive (1 = none); got {self.penalty}")

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        seen = scores.gather(1, token_ids)
        return scores.scatter(
            1, token_ids, torch.where(seen > 0, seen / self.penalty, seen * self.penalty)
        )


@dataclass(frozen=True, slots=True)
class CountPenalty:
    """Subtracts `presence` once, and `frequency` once for each time, from the logits of tokens that the completion holds.

    Source: the OpenAI API's `presence_penalty` and `frequency_penalty`; like there, the prompt does
    not count.

    Args:
        num_prompt_tokens: Tokens at the start of the text that do not count.
        presence: Taken off once.
        frequency: Taken off for every occurrence.
    """

    num_prompt_tokens: int
    presence: float | int = 0.0
    frequency: float | int = 0.0

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        written = token_ids[:, self.num_prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add(
            1, written, torch.ones_like(written, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0).to(scores.dtype)


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Keeps tokens that end a text from coming before the completion has `count` tokens.

    Args:
        num_prompt_tokens: Tokens at the start of the text that do not count.
        count: Tokens of the completion before an end may come.
        end_ids: Tokens that end the text.
    """

    num_prompt_tokens: int
    count: int
    end_ids: frozenset[int]

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        if token_ids.shape[1] - self.num_prompt_tokens >= self.count:
            return scores
        scores[:, sorted(self.end_ids)] = -torch.inf  # processors get a copy
        return scores


def text_processors(
    num_prompt_tokens: int,
    vocab_size: int,
    *,
    min_tokens: int = 0,
    end_ids: frozenset[int] = frozenset(),
    logit_bias: Mapping[int, float | int] | None = None,
    repetition_penalty: float | int = 1.0,
    presence_penalty: float | int = 0.0,
    frequency_penalty: float | int = 0.0,
) -> tuple[Processor, ...]:
    """Processors in the order of vLLM: bias, repetition, frequency and presence, then fewest tokens.

    Neutral ones are left out.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        vocab_size: Number of tokens of the target.
        min_tokens: Fewest tokens of the completion.
        end_ids: Tokens that end the text.
        logit_bias: What is added to logits, by token id.
        repetition_penalty: See `RepetitionPenalty`; 1 is neutral.
        presence_penalty: See `CountPenalty`.
        frequency_penalty: See `CountPenalty`.

    Raises:
        OptionError: If a value cannot be honoured.
    """
    made: list[Processor] = []
    if logit_bias:
        made.append(LogitBias(logit_bias, vocab_size))
    if repetition_penalty != 1:
        made.append(RepetitionPenalty(repetition_penalty))
    if presence_penalty != 0 or frequency_penalty != 0:
        made.append(CountPenalty(num_prompt_tokens, presence_penalty, frequency_penalty))
    if min_tokens and end_ids:
        made.append(MinTokens(num_prompt_tokens, min_tokens, end_ids))
    return tuple(map(Stateless, made))
