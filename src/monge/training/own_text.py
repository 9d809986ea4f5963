"""Rows of text that a target writes itself, all of one length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import OptionError
from monge.training.answers import AnswerSettings, write_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings of the text.

    Args:
        num_tokens: Approximate number of tokens, including prompts.
        row_length: Tokens per row.
        prompt_length: Maximum tokens per prompt.
        temperature: Sampling temperature.
        batch_size: Rows per batch.
        seed: Each batch derives its own seed.

    Raises:
        OptionError: If a number is out of range.
    """

    num_tokens: int = 100_000
    row_length: int = 192
    prompt_length: int = 48
    temperature: float = 1.0
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            not 0 < self.prompt_length < self.row_length
            or self.num_tokens < self.row_length
            or self.batch_size < 1
        ):
            raise OptionError(
                "own text: need num_tokens >= row_length > prompt_length >= 1 and batch_size >= "
                "1; got "
                f"{self.num_tokens}, {self.row_length}, {self.prompt_length} and {self.batch_size}"
            )
        if not self.temperature > 0:
            raise OptionError(f"own text: temperature must be above 0; got {self.temperature}")

    @property
    def num_rows(self) -> int:
        """Number of rows for `num_tokens`."""
        return self.num_tokens // self.row_length


def write_own_text(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: TextSettings,
    folder: Path,
    on_rows: Callable[[float], None] = lambda count: None,
) -> Int64[Tensor, "rows seq"]:
    """Let the target continue prompts, used in turn; a rerun keeps the rows of an interrupted call.

    Args:
        network: The target.
        prompts: Token ids, each of at least one token.
        settings: Settings of the text.
        folder: Folder of `answers.jsonl`.
        on_rows: Receives the number of new rows, in parts while a batch is written.

    Raises:
        OptionError: If there is no prompt, or the folder holds other text.
    """
    if not prompts:
        raise OptionError("own text: there are no prompts to continue; give --data with some text")
    in_turn = islice(cycle(prompts), settings.num_rows)
    answers = AnswerSettings(
        prompt_length=settings.prompt_length,
        temperatures=(settings.temperature,),
        batch_size=settings.batch_size,
        seed=settings.seed,
        row_length=settings.row_length,
    )
    written = write_answers(network, list(in_turn), answers, folder, on_rows)
    return torch.tensor([[*one.prompt, *one.answer] for one in written])


def cut_rows(texts: Sequence[Sequence[int]], row_length: int) -> Int64[Tensor, "rows seq"]:
    """Concatenate texts and cut them into rows; the rest is dropped.

    Raises:
        OptionError: If the text does not fill a row.
    """
    tokens = [token for text in texts for token in text]
    num_rows = len(tokens) // row_length
    if num_rows == 0:
        raise OptionError(
            f"own text: {len(tokens)} tokens do not fill a row of {row_length}; give more text"
        )
    return torch.tensor(tokens[: num_rows * row_length]).unflatten(0, (num_rows, row_length))
