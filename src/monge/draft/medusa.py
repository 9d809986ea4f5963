"""Runs Medusa and Hydra heads: one network for each future token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock
from monge.draft.head_run import HeadRun, Pairs, TargetEnds, known
from monge.heads.readers.base import StepHead
from monge.heads.readers.reading import Reading


@dataclass(slots=True)
class _Text:
    reading: Reading
    base: Tensor | None = None
    root: int = 0
    paths: list[tuple[int, ...]] = field(default_factory=list)


class StepRun(HeadRun[_Text]):
    """Runs a `StepHead`.

    Step i, from 0, predicts the (i + 1)-th token after the last committed one. The target has not
    computed the state of the last committed token yet, so the state is that of the token before.
    """

    def __init__(self, head: StepHead, ends: TargetEnds) -> None:
        super().__init__()
        self._head, self._ends = head, ends

    def open(self, request: int) -> None:
        self._texts[request] = _Text(Reading(self._head.num_kept))

    def knows(self, request: int) -> bool:
        return self._texts[request].base is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        segments = [
            self._texts[request].reading.read(one.positions) for request, one in pairs.items()
        ]
        states = self._head.read(torch.cat([one.features for one in pairs.values()]), segments)
        parts = states.split([len(one.token_ids) for one in pairs.values()])
        for request, part in zip(pairs, parts, strict=True):
            self._texts[request].base = part[-1:]

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        for request, root in roots.items():
            self._texts[request].root = root
        return self._step(0, {request: [()] for request in roots})

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        new: dict[int, list[tuple[int, ...]]] = {}
        for request, block in blocks.items():
            paths = self._texts[request].paths
            for token, parent in zip(block.token_ids, block.parents, strict=True):
                paths.append((*(() if parent < 0 else paths[parent]), token))
            new[request] = paths[len(paths) - len(block.token_ids) :]
        depth = len(next(iter(new.values()))[0])
        return self._step(depth, new)

    def end(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._texts[request].paths.clear()

    def _step(
        self, index: int, paths: Mapping[int, Sequence[tuple[int, ...]]]
    ) -> Mapping[int, Tensor]:
        # If the head does not read the tokens, all nodes of a depth share one law.
        asked = (
            paths
            if self._head.reads_tokens
            else {request: own[:1] for request, own in paths.items()}
        )
        counts = [len(own) for own in asked.values()]
        values = torch.cat(
            [
                known(self._texts[request].base).expand(len(own), -1)
                for request, own in asked.items()
            ]
        )
        if self._head.reads_tokens:
            tokens = [
                (self._texts[request].root, *path) for request, own in asked.items() for path in own
            ]
            embedded = [
                self._ends.embed([path[place] for path in tokens]) for place in range(index + 1)
            ]
            values = torch.cat([values, *embedded], dim=-1)
        logits = self._head.step(index, values).split(counts)
        return {
            request: one.expand(len(paths[request]), -1)
            for request, one in zip(paths, logits, strict=True)
        }
