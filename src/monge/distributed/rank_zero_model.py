"""A network that is sharded over several processes and controlled by rank 0."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OutOfStepError
from monge.core.model import NodeBlock, SequenceModel, dtype_of
from monge.distributed.ranks import Ranks

_CALLS: Final[Mapping[str, Callable[[SequenceModel, Any], Any]]] = {
    "open": lambda model, prefixes: model.open(prefixes),
    "append": lambda model, pieces: model.append(pieces),
    "extend": lambda model, blocks: model.extend(blocks),
    "commit": lambda model, paths: model.commit(paths),
    "close": lambda model, sequence: model.close(sequence),
}
_END: Final = "end"


class RankZeroModel:
    """The whole network on rank 0: a `SequenceModel` whose calls run on every rank.

    Only rank 0 drafts, draws, verifies and plans, because logits may differ between ranks in their
    last bits, and clocks differ. The other ranks take part in every forward.

    Args:
        model: The part of this rank.
        ranks: All processes.
    """

    def __init__(self, model: SequenceModel, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._failure: str | None = None

    def __repr__(self) -> str:
        return f"RankZeroModel({self._model!r}, {self._ranks.size} ranks)"

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def dtype(self) -> torch.dtype | None:
        return dtype_of(self._model)

    @property
    def max_length(self) -> int | None:
        return self._model.max_length

    @property
    def no_tree_reason(self) -> str | None:
        return self._model.no_tree_reason

    @property
    def no_draft_reason(self) -> str | None:
        return self._model.no_draft_reason

    @property
    def forward_s(self) -> float:
        return self._model.forward_s

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks(
            "open", {sequence: tuple(tokens) for sequence, tokens in prefixes.items()}
        )

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks(
            "append", {sequence: tuple(tokens) for sequence, tokens in pieces.items()}
        )

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        return self._on_all_ranks("extend", dict(blocks))

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks("commit", {sequence: tuple(path) for sequence, path in paths.items()})

    def length(self, sequence: int) -> int:
        return self._model.length(sequence)

    def close(self, sequence: int) -> None:
        self._on_all_ranks("close", sequence)

    def _on_all_ranks(self, call: str, argument: Any) -> Any:  # noqa: ANN401
        if self._failure is not None:
            raise OutOfStepError(f"the ranks are out of step since {self._failure}; start again")
        # A failure in this call leaves the other ranks in the middle of it.
        self._failure = f"{call} failed on rank 0"
        self._ranks.broadcast((call, argument))
        result = _CALLS[call](self._model, argument)
        self._failure = None
        return result


def follow(model: SequenceModel, ranks: Ranks) -> None:
    """Repeat the calls of rank 0 on this part of the network, until rank 0 ends."""
    while True:
        call, argument = ranks.receive()
        if call == _END:
            return
        _CALLS[call](model, argument)


def release(ranks: Ranks) -> None:
    """Release the other ranks; for rank 0."""
    ranks.broadcast((_END, None))
