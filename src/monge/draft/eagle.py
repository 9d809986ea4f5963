"""Runs EAGLE-3 heads and multi-token-prediction modules: a state and a token give the next state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jaxtyping import Float
from torch import Tensor

from monge.draft.head_run import HeadRun, Pairs, known, rows_of
from monge.laws.levels import DrawnTrees, RootDraws
from monge.networks.base import HeadModel, NodeBlock


@dataclass(slots=True)
class _Read:
    """Last logits, last state, and the states of drafted nodes."""

    logits: Tensor | None = None
    last: Tensor | None = None
    states: list[Tensor] = field(default_factory=list[Tensor])


class ChainRun(HeadRun[_Read]):
    """Runs the steps of a `ChainHead`, whose cache and forwards are those of a backend.

    Committed text is read as pairs of the target's state at x_t and the token x_{t+1}, at position
    t. The last pair gives the logits at the root. A drafted token is paired with the state that the
    head predicted at its parent. Drafted pairs are dropped at the end of the round, so the cache
    depends on the target's states only.
    """

    def __init__(self, model: HeadModel) -> None:
        super().__init__()
        self._model = model

    def open(self, request: int) -> None:
        self._texts[request] = _Read()
        self._model.open(request)

    def close(self, request: int) -> None:
        if self._texts.pop(request, None) is not None:
            self._model.close(request)

    def knows(self, request: int) -> bool:
        return self._texts[request].last is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        blocks = {
            request: NodeBlock.chain(row_pairs.token_ids) for request, row_pairs in pairs.items()
        }
        features = [row_pairs.features for row_pairs in pairs.values()]
        states, logits = self._model.read(blocks, rows_of(features))
        ends = accumulate(len(row_pairs.token_ids) for row_pairs in pairs.values())
        for request, end, row in zip(pairs, ends, logits.split(1), strict=True):
            text = self._texts[request]
            text.last, text.logits = states[end - 1 : end], row

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one some"]]:
        return {request: known(self._texts[request].logits) for request in roots}

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes some"]]:
        above = [
            known(self._texts[request].last) if parent < 0 else self._texts[request].states[parent]
            for request, block in blocks.items()
            for parent in block.parents
        ]
        states, logits = self._model.extend(blocks, rows_of(above))
        counts = [len(block.token_ids) for block in blocks.values()]
        for request, part in zip(blocks, states.split(counts), strict=True):
            self._texts[request].states.extend(part.split(1))
        return dict(zip(blocks, logits.split(counts), strict=True))

    def draw_trees(self, draws: RootDraws) -> DrawnTrees:
        """See `LevelForward.draw`."""
        states = {request: known(self._texts[request].last) for request in draws.logits}
        return self._model.draw_trees(draws, states)

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._model.drop(request)
            self._texts[request].states.clear()
