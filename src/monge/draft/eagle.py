"""Runs EAGLE heads and multi-token-prediction modules: a state and a token give the next state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import ModuleHost, NodeBlock
from monge.draft.head_run import HeadRun, Pairs, TargetEnds, known
from monge.heads.readers.attention import GroupedAttention, read_segments
from monge.heads.readers.base import ChainHead
from monge.heads.readers.decoder import DecoderLayer
from monge.heads.readers.eagle3 import AfterAttention, BeforeAttention, Eagle3Head, split_layer
from monge.heads.readers.reading import Reading, Segment

_POSITIONS: Final = 1024  # angles that are computed at once
_MOST_ROWS: Final = 16
"""Of a split step: with more, as in a prompt, logits of every row would take longer than they save."""


@dataclass(slots=True)
class _Text:
    reading: Reading
    last: Tensor | None = None
    last_logits: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)


class _SplitStep:
    """A step of a head of one layer as two programs, see `monge.heads.readers.eagle3`.

    Args:
        host: The target, whose backend runs the programs.
        like: An embedding `[1, hidden]`, for its width, type and device.
    """

    def __init__(
        self, head: Eagle3Head, layer: DecoderLayer, host: ModuleHost, like: Float[Tensor, "one _"]
    ) -> None:
        assert isinstance(layer.attention, GroupedAttention)
        self._attention = attention = layer.attention
        half = attention.rotary.dim // 2

        def row(width: int) -> Tensor:
            return like.new_zeros(1, width)

        self._before = host.module_program(
            BeforeAttention(head, attention).eval(),
            [like, row(attention.hidden), row(half), row(half)],
        )
        self._after = host.module_program(
            AfterAttention(head, layer).eval(),
            [row(attention.hidden), row(attention.heads * attention.head_dim)],
        )
        self._angles = attention.rotary.angles(torch.arange(_POSITIONS), like)

    def __call__(
        self, embeddings: Tensor, states: Tensor, segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        """The next states and their logits."""
        positions, rotary = torch.cat([one.positions for one in segments]), self._attention.rotary
        if int(positions.max()) >= len(self._angles[0]):
            self._angles = rotary.angles(torch.arange(2 * int(positions.max())), states)
        cos, sin = (angles[positions.to(angles.device), 0] for angles in self._angles)
        residual, *parts = self._before(embeddings, states, cos, sin)
        dim = self._attention.head_dim
        queries, keys, values = (part.unflatten(1, (-1, dim)) for part in parts)
        mixed = read_segments(queries, keys, values, segments, 0, window=self._attention.window)
        after, logits = self._after(residual, mixed)
        return after, logits


class ChainRun(HeadRun[_Text]):
    """Runs a `ChainHead`.

    Committed text is read as pairs of the target's state at x_t and the token x_{t+1}, at position
    t. The last pair gives the logits at the root. A drafted token is paired with the state that the
    head predicted at its parent. Drafted pairs are dropped at the end of the round, so the cache
    depends on the target's states only.

    Args:
        host: The target, if its backend runs modules beside it.
    """

    def __init__(self, head: ChainHead, ends: TargetEnds, host: ModuleHost | None = None) -> None:
        super().__init__()
        self._head, self._ends = head, ends
        self._split: _SplitStep | None = None
        layer = split_layer(head)
        if layer is not None and host is not None:
            assert isinstance(head, Eagle3Head)
            self._split = _SplitStep(head, layer, host, self._embedded((0,)))

    def open(self, request: int) -> None:
        self._texts[request] = _Text(Reading(self._head.num_kept))

    def knows(self, request: int) -> bool:
        return self._texts[request].last is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        segments = [
            self._texts[request].reading.read(one.positions) for request, one in pairs.items()
        ]
        states = self._head.fuse(torch.cat([one.features for one in pairs.values()]))
        tokens = [token for one in pairs.values() for token in one.token_ids]
        counts = [len(one.token_ids) for one in pairs.values()]
        embedded, logits = self._embedded(tokens), None
        if self._split is not None and len(tokens) <= _MOST_ROWS:
            states, logits = self._split(embedded, states, segments)
        else:
            states = self._head.advance(embedded, states, segments)
        ends = [end - 1 for end in accumulate(counts)]
        for request, end in zip(pairs, ends, strict=True):
            text = self._texts[request]
            text.last = states[end : end + 1]
            text.last_logits = None if logits is None else logits[end : end + 1]

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one some"]]:
        unknown = [request for request in roots if self._texts[request].last_logits is None]
        if unknown:
            logits = self._head.logits(
                torch.cat([self._state(request) for request in unknown]), self._ends.unembed
            )
            for request, row in zip(unknown, logits.split(1), strict=True):
                self._texts[request].last_logits = row
        return {request: known(self._texts[request].last_logits) for request in roots}

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes some"]]:
        segments = [self._texts[request].reading.extend(block) for request, block in blocks.items()]
        above = [
            self._state(request, parent)
            for request, block in blocks.items()
            for parent in block.parents
        ]
        tokens = [token for block in blocks.values() for token in block.token_ids]
        embedded, parents = self._embedded(tokens), torch.cat(above)
        if self._split is None:
            states = self._head.advance(embedded, parents, segments)
            logits = self._head.logits(states, self._ends.unembed)
        else:
            states, logits = self._split(embedded, parents, segments)
        counts = [len(block.token_ids) for block in blocks.values()]
        for request, part in zip(blocks, states.split(counts), strict=True):
            self._texts[request].states.extend(part.split(1))
        return dict(zip(blocks, logits.split(counts), strict=True))

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._texts[request].reading.drop()
            self._texts[request].states.clear()

    def _state(self, request: int, node: int = -1) -> Tensor:
        text = self._texts[request]
        return known(text.last) if node < 0 else text.states[node]

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        own = self._head.embed(self._ends.ids(token_ids))
        return self._ends.embed(token_ids) if own is None else own
