"""Tokens that may not come: those outside of a set, and those that would complete an unwanted sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monge.core.errors import OptionError
from monge.requests.processors import Processor, Stateless


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """Gives all tokens but some a probability of zero."""

    allowed_ids: tuple[int, ...]

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.tensor(self.allowed_ids).to(scores.device, non_blocking=True)
        return torch.full_like(scores, -torch.inf).index_copy(1, kept, scores[:, kept])


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Forbids the last token of a sequence where the completion ends with its other tokens, as vLLM does.

    Args:
        sequences: Token ids of the sequences.
        num_prompt_tokens: Tokens at the start of the text, which belong to no sequence.
    """

    sequences: tuple[tuple[int, ...], ...]
    num_prompt_tokens: int

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        num_written = token_ids.shape[1] - self.num_prompt_tokens
        longest = min(num_written, max(map(len, self.sequences)) - 1)
        end = tuple(token_ids[0, token_ids.shape[1] - longest :].tolist())
        last = [
            sequence[-1]
            for sequence in self.sequences
            if len(sequence) <= longest + 1 and sequence[:-1] == end[longest - len(sequence) + 1 :]
        ]
        return scores.index_fill(
            1, torch.tensor(last, dtype=torch.long).to(scores.device), -torch.inf
        )


def token_masks(
    num_prompt_tokens: int,
    vocab_size: int,
    *,
    allowed_ids: Sequence[int] | None = None,
    bad_words: Sequence[tuple[int, ...]] = (),
    late_ids: frozenset[int] = frozenset(),
) -> tuple[Processor, ...]:
    """Return the processors of some options.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        vocab_size: Number of tokens of the target.
        allowed_ids: The only tokens that may come; `None` for all.
        bad_words: Sequences of tokens that may not come.
        late_ids: Tokens that another processor forbids at first.

    Raises:
        OptionError: If there may be a place where no token is left.
    """
    banned = late_ids.union(sequence[-1] for sequence in bad_words)
    allowed = frozenset(allowed_ids or ())
    num_left = vocab_size - len(banned) if allowed_ids is None else len(allowed - banned)
    if num_left <= 0 and (bad_words or allowed_ids is not None):
        raise OptionError(
            "allowed_token_ids: bad_words and min_tokens leave none of these tokens; allow more"
        )
    processors: list[Processor] = []
    if allowed_ids is not None:
        processors.append(Stateless(AllowedTokens(tuple(allowed))))
    if bad_words:
        processors.append(Stateless(BadWords(tuple(bad_words), num_prompt_tokens)))
    return tuple(processors)
