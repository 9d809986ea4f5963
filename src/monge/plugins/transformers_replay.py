"""Stopping criteria and streamers, called as in plain decoding: one column of tokens at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import StoppingCriteriaList


class Replay:
    """Replays a batch token by token.

    Criteria are written for rectangular growth: they see `[batch, seq]` with one new column a call,
    and some decide for the whole batch at once. Rows of a speculative round grow by blocks of
    different lengths, so a column is passed on once every active row has it. A longer row is cut
    where the criteria stop it.

    Args:
        prompts: The prompts with their padding.
        criteria: Criteria, all called once per column.
        pad_token_id: Padding of stopped rows.
        streamer: Receives each settled column.
        scores: Gives the scores of a column, `[batch, vocab]`, if the criteria are shown them.
    """

    def __init__(
        self,
        prompts: Int64[Tensor, "batch seq"],
        criteria: StoppingCriteriaList,
        *,
        pad_token_id: int | None,
        streamer: Any = None,
        scores: Callable[[int], Float[Tensor, "batch vocab"]] | None = None,
    ) -> None:
        self._text, self._prompt_length = prompts, prompts.shape[1]
        self._criteria: Any = criteria
        self._streamer, self._column = streamer, scores
        self._scores: tuple[Tensor, ...] | None = None if scores is None else ()
        # As plain decoding does: without an end-of-text criterion stopped rows are not padded but
        # go on until all have stopped.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = pad_token_id
        self._rows: list[Sequence[int]] = [()] * prompts.shape[0]
        self._running = [True] * prompts.shape[0]
        self._late = set(range(prompts.shape[0]))  # rows that the next column waits for

    @property
    def text(self) -> Int64[Tensor, "batch seq"]:
        """Prompts and settled columns."""
        return self._text

    def grow(self, row: int, token_ids: Sequence[int]) -> None:
        """Record all tokens that a row has generated so far, and settle complete columns."""
        self._rows[row] = token_ids
        if len(token_ids) > self._num_settled:
            self._late.discard(row)
        while not self._late and any(self._running):
            self._settle()

    def needs(self, row: int) -> bool:
        """Whether more tokens of a row can matter."""
        return self._running[row] if self._pads else any(self._running)

    @property
    def _num_settled(self) -> int:
        return self._text.shape[1] - self._prompt_length

    def _settle(self) -> None:
        index = self._num_settled
        column = [
            tokens[index] if self.needs(row) else self._pad for row, tokens in enumerate(self._rows)
        ]
        tokens = torch.tensor(column, dtype=self._text.dtype, device=self._text.device)
        self._text = torch.cat([self._text, tokens[:, None]], dim=1)
        if self._column is not None and self._scores is not None:
            self._scores += (self._column(index),)
        stopped = self._criteria(self._text, self._scores).tolist()
        self._running = [
            running and not stops for running, stops in zip(self._running, stopped, strict=True)
        ]
        self._late = {
            row
            for row, tokens in enumerate(self._rows)
            if self.needs(row) and len(tokens) <= index + 1
        }
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
