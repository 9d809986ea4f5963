"""Chains of draft tokens: a CUDA graph reads the last token of every text and draws the next."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from monge.laws.from_logits import RuleRows, probs_from_logits, rule_rows
from monge.laws.levels import (
    DrawnLevels,
    LevelDraws,
    LevelShape,
    draw_level,
)
from monge.laws.quantiles import independent

LONGEST: Final = 64
"""Most tokens of a chain; padding writes as many columns after all texts."""

Outputs = tuple[Tensor, ...]
ReadTokens = Callable[[Tensor, Tensor], Tensor]
"""Reads a token of every row, `[rows, 1]`, behind its columns, `[rows]`; returns logits `[rows, 1, vocab]`."""


def is_chain(shape: LevelShape) -> bool:
    """Return whether trees are chains with a token to be read."""
    return max(shape.widths) == 1 and 1 < len(shape.widths) <= LONGEST


class ChainGraph:
    """The graph of a number of rows and a kind of sampling rules.

    Rows without a text are padding: they write to columns after all texts.

    Args:
        capture: Captures work that always uses the same memory; see `backends.cuda.Capture`.
        read: Reads tokens.
        starts: Where padding writes, and what runs before it is captured: columns of every row.
        kind: A member of `KINDS`.
        draft_ids: The tokens that logits are about, ascending; `None` for all.
    """

    def __init__(
        self,
        capture: Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]],
        read: ReadTokens,
        starts: Tensor,
        kind: str,
        draft_ids: Tensor | None,
    ) -> None:
        self.draft_ids, self._starts, self._kind = draft_ids, starts, kind
        num_rows = len(starts)
        self._lengths, self._place = starts.clone(), starts.new_zeros(1)
        self._token, self._drawn = (
            starts.new_zeros(num_rows, 1),
            starts.new_zeros(num_rows, LONGEST),
        )
        self._uniforms = starts.new_zeros(num_rows, LONGEST, dtype=torch.float64)
        # See `RuleRows`.
        self._rules = starts.new_ones(4, num_rows, dtype=torch.float64)
        # Whatever else the replays read: memory that nobody holds is given to others.
        self._read = read
        self._replay, self._outputs = capture(self._step)
        self._logits = torch.zeros_like(self._logits)
        self._replay_first, self._first = capture(lambda: self._draw(self._logits))

    def _step(self) -> Outputs:
        self._logits = self._read(self._token, self._lengths)
        self._lengths.add_(1)
        return self._draw(self._logits)

    def _draw(self, logits: Tensor) -> Outputs:
        probs = None
        if self._kind != "greedy":
            num_sorted = logits.shape[-1] if self._kind == "truncated" else None
            probs = probs_from_logits(logits, RuleRows(self._rules, num_sorted))
        uniforms = self._uniforms.index_select(1, self._place)
        token = draw_level(logits, probs, uniforms, independent, self.draft_ids)
        self._token.copy_(token.clamp_min(0))
        self._drawn.index_copy_(1, self._place, token)
        self._place.add_(1)
        return (token,) if probs is None else (token, probs)

    def draw(self, given: LevelDraws, rows: slice, lengths: Sequence[int]) -> DrawnLevels | None:
        """Draw chains for rows of the cache; `None` if logits at roots are numbers of another type.

        Args:
            given: What they are drawn from, row by row.
            rows: The rows.
            lengths: Their committed tokens.
        """
        if given.logits.dtype != self._logits.dtype:
            return None
        depth = len(given.shape.widths)
        self._lengths.copy_(self._starts)
        self._lengths[rows] = torch.tensor(lengths).to(self._lengths.device, non_blocking=True)
        self._uniforms[rows, :depth] = given.uniforms
        self._logits[rows] = given.logits
        self._place.zero_()
        if self._kind != "greedy":
            self._rules[:, rows] = rule_rows(given.rules, given.logits).numbers
        probs = list[Tensor]()
        replays = [
            (self._replay_first, self._first),
            *[(self._replay, self._outputs)] * (depth - 1),
        ]
        for replay, outputs in replays:
            replay()
            # The next replay writes over them.
            probs += [output[rows].clone() for output in outputs[1:]]
        token_ids = self._drawn[rows, :depth].clone()
        return DrawnLevels(token_ids, torch.cat(probs, 1) if probs else None)
