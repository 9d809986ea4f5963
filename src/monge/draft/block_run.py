"""Runs block heads: one pass for all depths, then a cheap correction by the previous token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock
from monge.draft.head_run import HeadRun, Pairs, TargetEnds, known
from monge.heads.readers.block import DFlashHead
from monge.heads.readers.reading import Reading


@dataclass(slots=True)
class _BlockText:
    reading: Reading
    rows: Tensor | None = None
    logits: Tensor | None = None
    root: Tensor | None = None
    depths: list[int] = field(default_factory=list)
    memories: list[Tensor] = field(default_factory=list)


class BlockRun(HeadRun[_BlockText]):
    """Runs a `DFlashHead`.

    The target's states at committed tokens are the context, at their positions. The last committed
    token, whose state is not known yet, is the anchor of the block at the next position; masks
    follow it.
    """

    def __init__(self, head: DFlashHead, ends: TargetEnds) -> None:
        super().__init__()
        self._head, self._ends = head, ends

    def open(self, request: int) -> None:
        self._texts[request] = _BlockText(Reading(self._head.num_kept))

    def knows(self, request: int) -> bool:
        return len(self._texts[request].reading) > 0

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        segments = [
            self._texts[request].reading.read(row_pairs.positions)
            for request, row_pairs in pairs.items()
        ]
        self._head.read(torch.cat([row_pairs.features for row_pairs in pairs.values()]), segments)

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        head, size = self._head, self._head.block_size
        chain = NodeBlock.chain((0,) * size)
        segments = [self._texts[request].reading.extend(chain) for request in roots]
        tokens = [
            token for root in roots.values() for token in (root, *[head.mask_token] * (size - 1))
        ]
        embedded = head.embed(self._ends.ids(tokens))
        states = head.predict(self._ends.embed(tokens) if embedded is None else embedded, segments)
        first = 0 if head.is_shifted else 1
        useful = states.unflatten(0, (len(roots), size))[:, first:]
        logits = head.logits(useful.flatten(0, 1), self._ends.unembed).unflatten(
            0, useful.shape[:2]
        )
        for request, rows, scores in zip(roots, useful, logits, strict=True):
            text = self._texts[request]
            text.rows, text.logits, text.root = rows, scores, rows.new_zeros(1, head.memory)
        return self._follow(
            {request: ([root], [0], [-1]) for request, root in roots.items()}, keep=False
        )

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        nodes: dict[int, tuple[Sequence[int], list[int], Sequence[int]]] = {}
        for request, block in blocks.items():
            depths = self._texts[request].depths
            for parent in block.parents:
                depths.append(1 if parent < 0 else depths[parent] + 1)
            nodes[request] = (
                block.token_ids,
                depths[len(depths) - len(block.parents) :],
                block.parents,
            )
        return self._follow(nodes, keep=True)

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            text = self._texts[request]
            text.reading.drop()
            text.depths.clear()
            text.memories.clear()
            text.rows = text.logits = text.root = None

    def _follow(
        self, nodes: Mapping[int, tuple[Sequence[int], Sequence[int], Sequence[int]]], *, keep: bool
    ) -> Mapping[int, Tensor]:
        """Return the logits at nodes, given their tokens, depths and parents."""
        rows, scores, memories, counts = [], [], [], []
        for request, (tokens, depths, parents) in nodes.items():
            text = self._texts[request]
            rows.append(known(text.rows)[list(depths)])
            scores.append(known(text.logits)[list(depths)])
            memories.extend(
                known(text.root) if parent < 0 else text.memories[parent] for parent in parents
            )
            counts.append(len(tokens))
        tokens = self._ends.ids(
            [token for token_ids, _, _ in nodes.values() for token in token_ids]
        )
        parts = (torch.cat(part) for part in (rows, memories, scores))
        logits, after = self._head.follow(tokens, *parts)
        for request, part in zip(nodes, after.split(counts), strict=True):
            if keep:
                self._texts[request].memories.extend(part.split(1))
            else:
                self._texts[request].root = part
        return dict(zip(nodes, logits.split(counts), strict=True))
