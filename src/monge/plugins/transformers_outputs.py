"""Text, scores and logits of `generate`, settled by columns of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from monge.requests.logprobs import TokenLogprob


@dataclass
class DrawnOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with `output_logprobs=True`: how every token was drawn.

    All are float32, `[batch, new]`, beside the new columns of `sequences`. Where a row has ended,
    log-probabilities are 0 and masses 1, so that sums over a row need no mask.

    Args:
        processed_logprobs: Under the distribution that the token was drawn from.
        raw_logprobs: Under the model's own distribution at temperature 1, before any processor.
        kept_mass: Mass that top-k, top-p and the like kept, of the distribution after the temperature. The
            log-probability in that distribution is `processed_logprobs + kept_mass.log()`.
    """

    processed_logprobs: Float[Tensor, "batch new"] | None = None
    raw_logprobs: Float[Tensor, "batch new"] | None = None
    kept_mass: Float[Tensor, "batch new"] | None = None


class VisitedRows:
    """Logits of a row before and after the processors, at the nodes that a verifier visits.

    The distribution of every committed token was made at a visited node, so each generated token finds its
    rows. Rows of nodes off the committed path are dropped as the text grows.

    Args:
        num_prompt_tokens: Length of the row's prompt, without padding.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._visited: dict[tuple[int, ...], list[Tensor]] = {}
        self.settled: list[list[Tensor]] = []
        """Logits and scores of every generated token, `[vocab]` each."""

    def note(
        self, token_ids: Int64[Tensor, "one seq"], scores: Float[Tensor, "one vocab"]
    ) -> Float[Tensor, "one vocab"]:
        """A processor that stores its input: called before the others at a node, and after them."""
        path = tuple(token_ids[0, self._num_prompt_tokens :].tolist())
        # Processors may write into their input.
        self._visited.setdefault(path, []).append(scores[0].clone())
        return scores

    def grow(self, completion_ids: Sequence[int]) -> None:
        """Settle the rows of all tokens that were generated so far."""
        text = tuple(completion_ids)
        new = range(len(self.settled), len(text))
        self.settled += [self._visited[text[:count]] for count in new]
        self._visited = {at: rows for at, rows in self._visited.items() if at[: len(text)] == text}


class Replay:
    """Replays a batch token by token.

    Criteria are written for rectangular growth: each call sees `[batch, seq]` with a new column,
    and some decide for the whole batch at once. Rows of a speculative round grow by blocks of
    different lengths, so a column is passed on once every active row has it. A longer row is cut
    where the criteria stop it.

    Args:
        prompts: The prompts with their padding.
        criteria: Criteria, all called once per column.
        pad_token_id: Padding of stopped rows.
        streamer: Receives each settled column.
        visited: Logits and scores of every row, if the caller requests them.
        shows_scores: Whether criteria are shown scores.
    """

    def __init__(
        self,
        prompts: Int64[Tensor, "batch seq"],
        criteria: StoppingCriteriaList,
        *,
        pad_token_id: int | None,
        streamer: Any = None,
        visited: Sequence[VisitedRows] = (),
        shows_scores: bool = False,
    ) -> None:
        self.text, self._prompt_length = prompts, prompts.shape[1]
        """Prompts and settled columns, `[batch, seq]`."""
        self._criteria: Any = criteria
        self._streamer, self.visited = streamer, visited
        self._scores: tuple[Tensor, ...] | None = () if shows_scores else None
        # As plain decoding does: without an end-of-text criterion stopped rows are not padded but
        # go on until all have stopped.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = pad_token_id
        self._rows: list[Sequence[int]] = [()] * prompts.shape[0]
        self._running = [True] * prompts.shape[0]
        self._lengths = [0] * prompts.shape[0]  # settled tokens of a row, without its padding

    @property
    def num_settled(self) -> int:
        """Number of settled columns."""
        return self.text.shape[1] - self._prompt_length

    def grow(self, row: int, completion_ids: Sequence[int]) -> None:
        """Record all tokens that a row has generated so far, and settle complete columns."""
        self._rows[row] = completion_ids
        if self.visited:
            self.visited[row].grow(completion_ids)
        while any(self._running) and not any(
            self.needs(place) and len(tokens) <= self.num_settled
            for place, tokens in enumerate(self._rows)
        ):
            self._settle()

    def needs(self, row: int) -> bool:
        """Return whether more tokens of a row can matter."""
        return self._running[row] if self._pads else any(self._running)

    def column(self, index: int, which: int) -> Float[Tensor, "batch vocab"]:
        """Return a generated column of `generate`: logits (0) or scores (1), 0 in stopped rows."""
        columns = [row.settled[index : index + 1] for row in self.visited]
        like = next(pairs[0][which] for pairs in columns if pairs)
        return torch.stack(
            [pairs[0][which] if pairs else torch.zeros_like(like) for pairs in columns]
        )

    def drawn(self, entries: Sequence[Sequence[TokenLogprob]]) -> dict[str, Tensor]:
        """Return the fields of `DrawnOutput`, from the entries of every row's tokens."""
        nothing, numbers = (0.0, 0.0, 1.0), list[list[tuple[float, float, float]]]()
        for length, of_row in zip(self._lengths, entries, strict=True):
            drawn = [entry.drawn for entry in of_row[:length] if entry.drawn is not None]
            row = [(token.processed, token.raw, token.kept_mass) for token in drawn]
            numbers.append(row + [nothing] * (self.num_settled - len(row)))
        every = torch.tensor(numbers, device=self.text.device)  # [batch, new, 3]
        names = "processed_logprobs", "raw_logprobs", "kept_mass"
        return dict(zip(names, every.unbind(-1), strict=True))

    def _settle(self) -> None:
        index = self.num_settled
        for row in range(len(self._rows)):
            self._lengths[row] += self.needs(row)
        column = [
            tokens[index] if self.needs(row) else self._pad for row, tokens in enumerate(self._rows)
        ]
        tokens = torch.tensor(column, dtype=self.text.dtype, device=self.text.device)
        self.text = torch.cat([self.text, tokens[:, None]], dim=1)
        if self._scores is not None:
            self._scores += (self.column(index, 1),)
        stopped = self._criteria(self.text, self._scores).tolist()
        self._running = [
            running and not stops for running, stops in zip(self._running, stopped, strict=True)
        ]
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
