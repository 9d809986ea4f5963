"""Runs block heads: one pass for all depths, then a cheap correction by the previous token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from monge.draft.head_run import HeadRun, Pairs, TargetEnds, known, rows_of
from monge.heads.readers.block import DFlashHead
from monge.networks.base import HeadModel, NodeBlock


@dataclass(slots=True)
class _BlockText:
    is_read: bool = False
    rows: Tensor | None = None
    logits: Tensor | None = None
    root: Tensor | None = None
    depths: list[int] = field(default_factory=list)
    memories: list[Tensor] = field(default_factory=list)


class BlockRun(HeadRun[_BlockText]):
    """Runs a `DFlashHead`, whose cache is a backend's.

    The target's states at committed tokens are the context, at their positions. The last committed
    token, whose state is not known yet, is the anchor of the block at the next position; masks
    follow it.
    """

    def __init__(self, head: DFlashHead, ends: TargetEnds, model: HeadModel) -> None:
        super().__init__()
        self._head, self._ends, self._model = head, ends, model

    def open(self, request: int) -> None:
        self._texts[request] = _BlockText()
        self._model.open(request)

    def close(self, request: int) -> None:
        if self._texts.pop(request, None) is not None:
            self._model.close(request)

    def knows(self, request: int) -> bool:
        return self._texts[request].is_read

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        chains = {request: NodeBlock.chain(pair.token_ids) for request, pair in pairs.items()}
        self._model.read(chains, rows_of([pair.features for pair in pairs.values()]))
        for request in pairs:
            self._texts[request].is_read = True

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        head, size = self._head, self._head.block_size
        masks = [head.mask_token] * (size - 1)
        blocks = {request: NodeBlock.chain((root, *masks)) for request, root in roots.items()}
        states, _ = self._model.extend(blocks, head.fc.weight.new_zeros(size * len(roots), 0))
        for request in roots:
            self._model.drop(request)
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
