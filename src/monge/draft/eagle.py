"""Runs EAGLE heads and multi-token-prediction modules: a state and a token give the next state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock
from monge.draft.head_run import HeadRun, Pairs, TargetEnds
from monge.heads.readers.base import ChainHead
from monge.heads.readers.reading import Reading


@dataclass(slots=True)
class _Text:
    reading: Reading
    last: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)


class ChainRun(HeadRun):
    """Runs a `ChainHead`.

    Committed text is read as pairs of the target's state at x_t and the token x_{t+1}, at position
    t. The last pair gives the logits at the root. A drafted token is paired with the state that the
    head predicted at its parent. Drafted pairs are dropped at the end of the round, so the cache
    depends on the target's states only.

    Args:
        head: The head.
        ends: The target's ends.
    """

    def __init__(self, head: ChainHead, ends: TargetEnds) -> None:
        self._head, self._ends = head, ends
        self._texts: dict[int, _Text] = {}

    def open(self, request: int) -> None:
        self._texts[request] = _Text(Reading(self._head.num_kept))

    def close(self, request: int) -> None:
        self._texts.pop(request, None)

    def knows(self, request: int) -> bool:
        return self._texts[request].last is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        segments = [self._texts[request].reading.read(one.positions) for request, one in pairs.items()]
        states = self._head.fuse(torch.cat([one.features for one in pairs.values()]))
        tokens = [token for one in pairs.values() for token in one.token_ids]
        parts = self._head.advance(self._embedded(tokens), states, segments).split(
            [len(one.token_ids) for one in pairs.values()]
        )
        for request, part in zip(pairs, parts, strict=True):
            self._texts[request].last = part[-1:]

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        logits = self._head.logits(torch.cat([self._last(request) for request in roots]), self._ends.unembed)
        return dict(zip(roots, logits.split(1), strict=True))

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        segments = [self._texts[request].reading.extend(block) for request, block in blocks.items()]
        above = [self._state(request, parent) for request, block in blocks.items() for parent in block.parents]
        tokens = [token for block in blocks.values() for token in block.token_ids]
        states = self._head.advance(self._embedded(tokens), torch.cat(above), segments)
        counts = [len(block.token_ids) for block in blocks.values()]
        for request, part in zip(blocks, states.split(counts), strict=True):
            self._texts[request].states.extend(part.split(1))
        logits = self._head.logits(states, self._ends.unembed)
        return dict(zip(blocks, logits.split(counts), strict=True))

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._texts[request].reading.drop()
            self._texts[request].states.clear()

    def _state(self, request: int, node: int) -> Tensor:
        return self._last(request) if node < 0 else self._texts[request].states[node]

    def _last(self, request: int) -> Tensor:
        last = self._texts[request].last
        assert last is not None
        return last

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        own = self._head.embed(self._ends.ids(token_ids))
        return self._ends.embed(token_ids) if own is None else own
