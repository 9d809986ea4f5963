"""A draft model with another tokenizer, seen through the target's tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import ContextLengthError
from monge.core.model import NodeBlock, SequenceModel, dtype_of
from monge.engine.models.vocabulary_mapping import VocabularyMapping

_NEIGHBOURS: Final = 8
"""Tokens of the text that are retokenised with a continuation.

Pieces depend on what stands before them.
"""


@dataclass(slots=True)
class _Row:
    """One sequence.

    Args:
        text: Committed target tokens.
        nodes: For every uncommitted node the draft nodes that spell its path.
        tokens: The uncommitted nodes' own tokens.
        num_slots: Uncommitted draft nodes.
        num_own: Committed draft tokens.
        logits: The draft model's after the node that was read last.
    """

    text: list[int] = field(default_factory=list)
    nodes: list[tuple[int, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_slots: int = 0
    num_own: int = 0
    logits: Tensor | None = None


class CrossTokenizerModel:
    """Reads target tokens as the draft tokens that spell them, and answers in the target's vocabulary; a `ForeignModel`.

    A node of the target's tree becomes a chain of draft nodes. Its logits are those after the last
    of them, for the tokens that both vocabularies have; the others get none, so a law made of them
    is the draft law given that the token is shared.

    Args:
        model: The draft model, in its own vocabulary.
        mapping: How target tokens are written in it.
        draft_tokenizer: The draft model's tokenizer.
        target_tokenizer: The target's.

    Reference:
        Timor et al., arXiv 2502.05202: token-level intersection (TLI), and string-level exact match
        (SLEM) for continuations.
    """

    def __init__(
        self,
        model: SequenceModel,
        mapping: VocabularyMapping,
        draft_tokenizer: Any,
        target_tokenizer: Any,
    ) -> None:
        self._model, self._mapping = model, mapping
        self._draft_tokenizer, self._target_tokenizer = draft_tokenizer, target_tokenizer
        self._shared = torch.tensor(mapping.shared).T
        self._rows: dict[int, _Row] = {}
        self.vocab_size, self.dtype = len(mapping.written), dtype_of(model)
        self.max_length = model.max_length
        self.no_tree_reason = model.no_tree_reason
        self.no_draft_reason = model.no_draft_reason

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._model.forward_s

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        own = {sequence: self._mapping.read(tokens) for sequence, tokens in prefixes.items()}
        for sequence, tokens in prefixes.items():
            self._rows[sequence] = _Row(text=list(tokens))
            self._fits(self._rows[sequence], len(own[sequence]))
        self._model.open(own)
        for sequence, tokens in own.items():
            self._rows[sequence].num_own = len(tokens)

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        own = {sequence: self._mapping.read(tokens) for sequence, tokens in pieces.items()}
        for sequence, tokens in pieces.items():
            row = self._rows[sequence]
            row.text.extend(tokens)
            row.num_own += len(own[sequence])
            self._fits(row, row.num_own)
        self._model.append(own)

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        logits = self._model.extend(
            {sequence: self._own_block(sequence, block) for sequence, block in blocks.items()}
        )
        answers: dict[int, Tensor] = {}
        for sequence, block in blocks.items():
            row, own = self._rows[sequence], logits[sequence]
            first = row.num_slots - own.shape[0]
            ends = [path[-1] - first for path in row.nodes[-len(block.token_ids) :]]
            row.logits = own[ends[-1]]
            answers[sequence] = self._in_target_tokens(own[ends])
        return answers

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        own: dict[int, tuple[int, ...]] = {}
        for sequence, path in paths.items():
            row = self._rows[sequence]
            own[sequence] = row.nodes[path[-1]] if path else ()
            row.text.extend(row.tokens[node] for node in path)
            row.num_own += len(own[sequence])
            row.nodes, row.tokens, row.num_slots = [], [], 0
        self._model.commit(own)

    def length(self, sequence: int) -> int:
        return len(self._rows[sequence].text)

    def close(self, sequence: int) -> None:
        del self._rows[sequence]
        self._model.close(sequence)

    def continuations(self, counts: Mapping[int, int]) -> Mapping[int, tuple[int, ...]]:
        """See `ForeignModel`."""
        written: dict[int, list[int]] = {sequence: [] for sequence in counts}
        counts = {sequence: self._room(sequence, count) for sequence, count in counts.items()}
        active = {sequence: count for sequence, count in counts.items() if count > 0}
        while active:
            for sequence in active:
                logits = self._rows[sequence].logits
                assert logits is not None, "a text is read before it is continued"
                written[sequence].append(int(logits.argmax()))
            active = {
                sequence: count
                for sequence, count in active.items()
                if len(written[sequence]) < count
            }
            if active:
                blocks = {
                    sequence: NodeBlock((written[sequence][-1],), (len(written[sequence]) - 2,))
                    for sequence in active
                }
                for sequence, logits in self._model.extend(blocks).items():
                    self._rows[sequence].logits = logits[-1]
        self._model.commit(dict.fromkeys(counts, ()))
        return {
            sequence: self._retokenised(self._rows[sequence].text, own)
            for sequence, own in written.items()
        }

    def _own_block(self, sequence: int, block: NodeBlock) -> NodeBlock:
        row = self._rows[sequence]
        tokens: list[int] = []
        parents: list[int] = []
        for token, parent in zip(block.token_ids, block.parents, strict=True):
            above = row.nodes[parent] if parent >= 0 else ()
            slots = list(above)
            for own in self._mapping.written[token]:
                parents.append(slots[-1] if slots else -1)
                tokens.append(own)
                slots.append(row.num_slots)
                row.num_slots += 1
            row.nodes.append(tuple(slots))
            row.tokens.append(token)
        self._fits(row, row.num_own + max(map(len, row.nodes)))
        return NodeBlock(tuple(tokens), tuple(parents))

    def _room(self, sequence: int, count: int) -> int:
        """How many of these tokens can be written; the last one is not read."""
        if self.max_length is None:
            return count
        return max(0, min(count, self.max_length - self._rows[sequence].num_own + 1))

    def _fits(self, row: _Row, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ContextLengthError(
                f"the text's {len(row.text)} tokens are {length} of the draft model's, which "
                f"reads {self.max_length}"
            )

    def _in_target_tokens(
        self, own: Float[Tensor, "nodes draft_vocab"]
    ) -> Float[Tensor, "nodes vocab"]:
        target_ids, draft_ids = self._shared.to(own.device)
        answers = own.new_full((own.shape[0], self.vocab_size), -math.inf)
        answers[:, target_ids] = own[:, draft_ids]
        return answers

    def _retokenised(self, text: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        new = self._draft_tokenizer.decode(list(own), skip_special_tokens=True).rstrip(
            "\N{REPLACEMENT CHARACTER}"
        )
        before = self._target_tokenizer.decode(list(text[-_NEIGHBOURS:]), skip_special_tokens=True)
        known, both = self._encode(before), self._encode(before + new)
        # Where the boundary moved, a token would have to be taken back; the new text alone is
        # spelled instead.
        return both[len(known) :] if both[: len(known)] == known else self._encode(new)

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._target_tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)
