"""Exact accept probabilities of the optimal rule given the candidates alone; the theory is in `transport/rearrangement.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law
from monge.transport.rearrangement import Rearrangement
from monge.transport.rearrangement_law import ScoreTable

SMALLEST_MASS: Final = 1e-290
"""Draft masses below this have no finite ratio p / q.

Such a token has no place on the line and is never accepted as a draw: less than 1e-284 of total
variation, for up to a million tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLine:
    """The score map of one node, on those tokens of the draft law that have a place on the line."""

    tokens: Int64[Tensor, " support"]
    line: Rearrangement

    @classmethod
    def of_node(cls, p: Law, scale: float, q: Law, width: int) -> "DraftLine":
        part = q.sparse()
        tokens = part.token_ids[part.probs > SMALLEST_MASS]
        target, draft = (scale * p.at(tokens)).cpu().numpy(), q.at(tokens).cpu().numpy()
        return cls(tokens=tokens, line=_line(target.tobytes(), draft.tobytes(), width))

    @property
    def accepted(self) -> Float64[Tensor, " support"]:
        return torch.from_numpy(self.line.accepted_masses).to(self.tokens.device)

    def enumerated_winner(self, drawn: Sequence[int], draws: Draws) -> int | None:
        """The accepted draw, by its probability given the draws."""
        reach = 1.0
        for token, prob in self.accept_probs(drawn).items():
            if draws.bernoulli(1.0 if prob >= reach else prob / reach):
                return token
            reach -= prob
        return None

    def accept_probs(self, drawn: Sequence[int]) -> dict[int, float]:
        """Accept probability of every distinct draw given all of them."""
        # What a quadrature gives to a token without accepted mass is rounding; the target may have
        # no law after such a token.
        masses = self.line.accepted_masses
        index_of = {token: i for i, token in enumerate(self.tokens.tolist()) if masses[i] > 0.0}
        on_line = tuple(sorted(index_of[token] for token in drawn if token in index_of))
        found = _table(self.line).accept_probs(on_line) if on_line else {}
        return {token: found.get(index_of.get(token, -1), 0.0) for token in dict.fromkeys(drawn)}


# An enumeration asks about one node once for every tuple of its candidates.
@lru_cache(maxsize=32)
def _line(target: bytes, draft: bytes, width: int) -> Rearrangement:
    return Rearrangement.build(np.frombuffer(target), np.frombuffer(draft), width)


@lru_cache(maxsize=32)
def _table(line: Rearrangement) -> ScoreTable:
    return ScoreTable.build(line)
