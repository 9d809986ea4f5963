"""Runs Medusa heads: one network for each future token."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock
from monge.draft.head_run import HeadRun, Pairs, known
from monge.heads.readers.medusa import MedusaHead


class StepRun(HeadRun[Tensor | None]):
    """Runs a `MedusaHead`. It reads no drafted token, so all nodes of a depth share one law.

    Step i, from 0, predicts the (i + 1)-th token after the last committed one. The target has not
    computed the state of the last committed token yet, so the state is that of the token before.
    """

    def __init__(self, head: MedusaHead) -> None:
        super().__init__()
        self._head, self._depth = head, 0

    def open(self, request: int) -> None:
        self._texts[request] = None

    def knows(self, request: int) -> bool:
        return self._texts[request] is not None

    def read(self, pairs: Mapping[int, Pairs]) -> None:
        self._texts |= {request: pair.features[-1:] for request, pair in pairs.items()}

    def begin(self, roots: Mapping[int, int]) -> Mapping[int, Float[Tensor, "one vocab"]]:
        self._depth = 0
        return self._step(dict.fromkeys(roots, 1))

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        self._depth += 1
        return self._step({request: len(block.token_ids) for request, block in blocks.items()})

    def end(self, requests: Sequence[int]) -> None:
        """Forget nothing: no drafted token was read."""

    def _step(self, num_nodes: Mapping[int, int]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        states = torch.cat([known(self._texts[request]) for request in num_nodes])
        logits = self._head.step(self._depth, states).split(1)
        rows = zip(num_nodes.items(), logits, strict=True)
        return {request: row.expand(count, -1) for (request, count), row in rows}
