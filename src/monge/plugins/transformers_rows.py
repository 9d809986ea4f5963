"""`output_scores` and `output_logits` of speculative decoding: one row per generated token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class VisitedRows:
    """Logits before and after the processors at the nodes that a verifier visits, of one row of the batch.

    The law of every committed token was made at a visited node, so each generated token finds its
    rows. Rows of nodes off the committed path are dropped as the text grows.

    Args:
        num_prompt_tokens: Length of the row's prompt, without padding.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._visited: dict[tuple[int, ...], list[Tensor]] = {}
        self._settled: list[list[Tensor]] = []

    def note(
        self, token_ids: Int64[Tensor, "one seq"], scores: Float[Tensor, "one vocab"]
    ) -> Float[Tensor, "one vocab"]:
        """A processor that stores its input: the first call at a node comes before the other processors, the second after."""
        at = tuple(token_ids[0, self._num_prompt_tokens :].tolist())
        # Processors may write into what they are given.
        self._visited.setdefault(at, []).append(scores[0].clone())
        return scores

    def grow(self, completion_ids: Sequence[int]) -> None:
        """Settle the rows of all tokens that the row has generated so far."""
        text = tuple(completion_ids)
        self._settled += [
            self._visited[text[:count]] for count in range(len(self._settled), len(text))
        ]
        self._visited = {at: rows for at, rows in self._visited.items() if at[: len(text)] == text}

    def settled(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Logits and scores of a generated token, each `[vocab]`; `None` if the row had stopped before it."""
        if index >= len(self._settled):
            return None
        logits, scores, *_ = self._settled[index]
        return logits, scores


def column(rows: Sequence[VisitedRows], index: int, which: int) -> Float[Tensor, "batch vocab"]:
    """The tensor of one generated column, as `generate` returns it.

    Args:
        rows: Visited rows of each row of the batch.
        index: Number of the column.
        which: 0 for logits, 1 for scores.

    Returns:
        Zero in rows that had stopped.
    """
    found = [row.settled(index) for row in rows]
    like = next(one for one in found if one is not None)[which]
    return torch.stack([torch.zeros_like(like) if one is None else one[which] for one in found])
