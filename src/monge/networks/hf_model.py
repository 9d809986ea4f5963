"""The part of a model around a `transformers` network that is the same for trees and chains."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import MongeError
from monge.networks.base import NodeBlock
from monge.networks.changing_rope import changing_rope
from monge.networks.forward import NetworkForward, SourceWeights
from monge.networks.network_facts import check_causal, context_length

_ENDING: Final = 2
"""Tokens before a limit of the rotary embedding that no draft reaches, only parts of prompts."""


class HfModel(ABC):
    """A causal language model in evaluation mode.

    Texts beyond a change of the rotary embedding are read alone, at the frequencies at which the
    host's `generate` reads them.

    Attributes:
        source: Checked whenever texts are opened.
        draft_length: See `monge.networks.base.draft_length`.

    Raises:
        UnsupportedModelError: If it is not causal, or takes no cache.
    """

    source: SourceWeights | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        check_causal(model)
        config = model.config.get_text_config()
        self.network = model
        self.dtype: torch.dtype = model.dtype
        self.num_layers, self.vocab_size = int(config.num_hidden_layers), int(config.vocab_size)
        self.max_length = context_length(config)
        self._rope = changing_rope(model)
        self.draft_length = None if self._rope is None else max(0, self._rope.limit - _ENDING)
        self._is_long = self._has_warned = False
        self._long = set[int]()
        self._texts, self._blocks = dict[int, list[int]](), dict[int, list[NodeBlock]]()
        self._device = model.device
        self._eager = NetworkForward(model)
        self._forward_s = 0.0

    def update_weights(self) -> None:
        """See `CopyingModel`."""
        if self.num_open:
            raise MongeError(f"weights are updated between texts; open now: {self.num_open}")
        if self.source is not None:
            self.network = self.source.renew()
            self._eager.follow(self.network)

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Number of open texts."""

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._forward_s

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """See `SequenceModel`."""
        near = dict(pieces)
        for sequence, tokens in pieces.items() if self._rope is not None else ():
            if length := self._length_read(sequence, NodeBlock.chain(tokens)):
                with self._at_length(sequence, length):
                    self._append({sequence: near.pop(sequence)})
            self._texts.setdefault(sequence, []).extend(tokens)
        if near:
            self._append(near)

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        """See `SequenceModel`."""
        if self._rope is None:
            return self._extend(blocks)
        logits, near = dict[int, Tensor](), dict(blocks)
        for sequence, block in blocks.items():
            if length := self._length_read(sequence, block):
                with self._at_length(sequence, length):
                    logits |= self._extend({sequence: near.pop(sequence)})
            self._blocks.setdefault(sequence, []).append(block)
        return logits | (self._extend(near) if near else {})

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """See `SequenceModel`."""
        for sequence, path in paths.items():
            if blocks := self._blocks.pop(sequence, ()):
                token_ids = [token for block in blocks for token in block.token_ids]
                self._texts[sequence] += [token_ids[slot] for slot in path]

    def close(self, sequence: int) -> None:
        """See `SequenceModel`."""
        self._long.discard(sequence)
        for noted in (self._texts, self._blocks):
            noted.pop(sequence, None)

    @abstractmethod
    def length(self, sequence: int) -> int:
        """See `SequenceModel`."""

    @abstractmethod
    def _append(self, pieces: Mapping[int, Sequence[int]]) -> None: ...

    @abstractmethod
    def _extend(self, blocks: Mapping[int, NodeBlock]) -> dict[int, Tensor]: ...

    @abstractmethod
    def _plainly(self, text: tuple[int, Sequence[int]] | None) -> AbstractContextManager[None]:
        """Read by the network itself; before that, read a sequence's committed tokens again."""

    def _length_read(self, sequence: int, block: NodeBlock) -> int | None:
        """Return the length that sets the frequencies of a block, or `None` before the change.

        A block is a tree that ends before the change, or part of a text. The last token of a prompt
        is read in the first round, at the frequencies of those before it.
        """
        if self._rope is None:
            return None
        length, width = self.length(sequence), len(block.parents)
        end = length + width + (width > 1)
        is_text = length >= self._rope.limit or block.continues(0)
        return end if is_text and end > self._rope.limit else None

    @contextmanager
    def _at_length(self, sequence: int, length: int) -> Iterator[None]:
        rope = self._rope
        assert rope is not None, "there is a change"
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{rope.reason}: these are decoded without drafts", stacklevel=5)
        is_first = rope.rereads and self.length(sequence) > 0 and sequence not in self._long
        again = (sequence, self._texts[sequence]) if is_first else None
        self._is_long = True
        try:
            with rope.at_length(self.network, length), self._plainly(again):
                self._long.add(sequence)
                yield
        finally:
            self._is_long = False
