"""A draft model seen through the target's vocabulary size."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.model import NodeBlock, SequenceModel


class ResizedVocabulary:
    """A model whose logits are cut or padded to another number of tokens; a `SequenceModel`.

    Models of one family often share a tokenizer but pad its vocabulary to different sizes. Padding
    tokens mean nothing, so those that the target lacks are never drafted, and those that the draft
    model lacks have no draft mass.

    Args:
        model: The draft model.
        vocab_size: The target's.
    """

    def __init__(self, model: SequenceModel, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        self.max_length = model.max_length
        self.no_tree_reason = model.no_tree_reason
        self.no_draft_reason = model.no_draft_reason

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._model.forward_s

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._model.open(prefixes)

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._model.append(pieces)

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        extra = self.vocab_size - self._model.vocab_size
        return {
            # A negative padding cuts.
            sequence: torch.nn.functional.pad(logits, (0, extra), value=-math.inf)
            for sequence, logits in self._model.extend(blocks).items()
        }

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self._model.commit(paths)

    def length(self, sequence: int) -> int:
        return self._model.length(sequence)

    def close(self, sequence: int) -> None:
        self._model.close(sequence)
