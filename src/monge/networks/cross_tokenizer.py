"""A draft model with another vocabulary, seen through the target's tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from monge.core.errors import ContextLengthError, VocabularyMismatchError
from monge.networks.base import NodeBlock, SequenceModel, draft_length, dtype_of

Spelling = bytes | str
"""The bytes of an ordinary token, or the name of a special token, such as an end of text."""

_NEIGHBOURS: Final = 8
"""Tokens of the text that are retokenised with a continuation, whose pieces depend on them."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""The space of SentencePiece."""


class _DraftModel:
    """A draft model that wraps another model, in a vocabulary of another size."""

    def __init__(self, model: SequenceModel, vocab_size: int) -> None:
        self._model, self.vocab_size, self.dtype = model, vocab_size, dtype_of(model)
        self.max_length = draft_length(model)
        self.why_no_tree, self.why_no_draft = model.why_no_tree, model.why_no_draft

    @property
    def forward_s(self) -> float:
        """Seconds spent inside the network's own forward."""
        return self._model.forward_s


class ResizedVocabulary(_DraftModel):
    """A model whose logits are cut or padded to another number of tokens; a `SequenceModel`.

    Models of a family often share a tokenizer but pad its vocabulary to different sizes. Padding
    tokens that the target lacks are never drafted, and those that the draft model lacks have no
    draft mass. If the text has a token that the draft model lacks, the model reads its own last
    token instead.
    """

    @property
    def resized(self) -> SequenceModel:
        """The model inside, which reads the same tokens."""
        return self._model

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._model.open({number: self._readable(text) for number, text in prefixes.items()})

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._model.append({number: self._readable(text) for number, text in pieces.items()})

    def _readable(self, text: Sequence[int]) -> Sequence[int]:
        last = self._model.vocab_size - 1
        is_readable = self.vocab_size <= last + 1 or max(text, default=0) <= last
        return text if is_readable else [min(token, last) for token in text]

    def _readable_block(self, block: NodeBlock) -> NodeBlock:
        # What a device still draws comes from this model, but for its root.
        if self.vocab_size <= self._model.vocab_size:
            return block
        tokens = self._readable(block.token_ids)
        return block if tokens is block.token_ids else NodeBlock(tuple(tokens), block.parents)

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        extra = self.vocab_size - self._model.vocab_size  # a negative padding cuts
        readable = {number: self._readable_block(block) for number, block in blocks.items()}
        return {
            sequence: torch.nn.functional.pad(logits, (0, extra), value=-math.inf)
            for sequence, logits in self._model.extend(readable).items()
        }

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self._model.commit(paths)

    def length(self, sequence: int) -> int:
        return self._model.length(sequence)

    def close(self, sequence: int) -> None:
        self._model.close(sequence)


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """Target tokens in the draft model's vocabulary.

    Args:
        shared: Tokens that both have, as target and draft ids.
        written: For every target token the draft tokens that spell it.
    """

    shared: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, ...], ...]

    def read(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a text in draft tokens."""
        return tuple(draft_token for token in token_ids for draft_token in self.written[token])


def map_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, vocab_size: int, draft_vocab_size: int
) -> VocabularyMapping:
    """Return the mapping from the target's vocabulary to the draft model's.

    A token that the draft model lacks is written with its longest tokens, from the left; tokens
    without a spelling there (special tokens of another family) are written as its end of text.

    Raises:
        VocabularyMismatchError: If a tokenizer does not say what its tokens spell, or no token is
            shared.
    """
    theirs, ours = spellings(target_tokenizer, "target"), spellings(draft_tokenizer, "draft model")
    own_id = {
        spelling: token
        for token, spelling in sorted(ours.items(), reverse=True)
        if token < draft_vocab_size
    }
    shared = tuple(
        (token, own_id[spelling])
        for token, spelling in sorted(theirs.items())
        if token < vocab_size and spelling in own_id
    )
    if not shared:
        raise VocabularyMismatchError(
            f"target and draft model share no token ({len(theirs)} and {len(ours)} are known), so "
            "nothing can be drafted across them; use another draft model"
        )
    end = getattr(draft_tokenizer, "eos_token_id", None)
    unknown = (int(end),) if end is not None else (shared[0][1],)
    longest = max((len(spelling) for spelling in own_id if isinstance(spelling, bytes)), default=0)
    written = tuple(
        _written(theirs.get(token), own_id, longest) or unknown for token in range(vocab_size)
    )
    return VocabularyMapping(shared, written)


def spellings(tokenizer: Any, whose: str) -> Mapping[int, Spelling]:
    """Return the spelling of every token of a tokenizer.

    Raises:
        VocabularyMismatchError: If it is of a kind whose tokens cannot be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyMismatchError(
            f"the {whose}'s tokenizer ({type(tokenizer).__name__}) does not say how its tokens "
            "are spelled; a fast tokenizer (tokenizer.json) is needed to draft across vocabularies"
        )
    parts = json.loads(backend.to_str())
    decoder = json.dumps(parts.get("decoder"))
    special = {int(added["id"]): str(added["content"]) for added in parts.get("added_tokens", ())}
    if '"ByteLevel"' in decoder:
        byte_of = {sign: byte for byte, sign in bytes_to_unicode().items()}

        def read(piece: str) -> Spelling:
            known = all(sign in byte_of for sign in piece)
            return bytes(byte_of[sign] for sign in piece) if known else piece

    elif _SPACE in json.dumps(parts, ensure_ascii=False):

        def read(piece: str) -> Spelling:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(_SPACE, " ").encode()

    else:
        raise VocabularyMismatchError(
            f"the {whose}'s tokenizer is neither byte-level nor of SentencePiece's kind (decoder "
            f"{decoder[:80]}); drafting across vocabularies is not possible with it"
        )
    return {
        int(token): special.get(int(token)) or read(piece)
        for piece, token in tokenizer.get_vocab().items()
    }


def _written(
    spelling: Spelling | None, own_id: Mapping[Spelling, int], longest: int
) -> tuple[int, ...]:
    """Return a spelling in draft tokens, the longest that fits each time; unknown bytes are left out."""
    if spelling is not None and spelling in own_id:
        return (own_id[spelling],)
    if not isinstance(spelling, bytes):
        return ()
    tokens: list[int] = []
    while spelling:
        sizes = range(min(longest, len(spelling)), 0, -1)
        size = next((size for size in sizes if spelling[:size] in own_id), None)
        if size is not None:
            tokens.append(own_id[spelling[:size]])
        spelling = spelling[size or 1 :]
    return tuple(tokens)


@dataclass(slots=True)
class _TokenizedRow:
    """The state of a sequence.

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


class CrossTokenizerModel(_DraftModel):
    """A draft model that reads target tokens as the draft tokens that spell them; a `ForeignModel`.

    A node of the target's tree becomes a chain of draft nodes. Its logits are those after the last
    of them, for the tokens that both vocabularies have. The others have no mass, so the
    distribution is the draft distribution given that the token is shared.

    Args:
        model: The draft model, in its own vocabulary.
        mapping: The draft tokens that spell each target token.
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
        super().__init__(model, len(mapping.written))
        self._mapping = mapping
        self._draft_tokenizer, self._target_tokenizer = draft_tokenizer, target_tokenizer
        self._shared = torch.tensor(mapping.shared).T
        self._longest = max(map(len, mapping.written))
        self._rows: dict[int, _TokenizedRow] = {}

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._rows |= {sequence: _TokenizedRow() for sequence in prefixes}
        self._model.open(self._readable(prefixes))

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._model.append(self._readable(pieces))

    def reach(self, sequence: int, text: Sequence[int], *, mixed: bool = False) -> int | None:
        """See `ForeignModel`. A token that both vocabularies have counts as one draft token."""
        if self.max_length is None:
            return None
        row = self._rows[sequence]
        unread = self._mapping.read(text[len(row.text) :])
        room = self.max_length - row.num_own - len(unread)
        return len(text) + room // (self._longest if mixed else 1)

    def _readable(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """Return pieces in draft tokens and note that they are read; those that do not fit are left out."""
        readable: dict[int, tuple[int, ...]] = {}
        for sequence, tokens in pieces.items():
            row, draft_tokens = self._rows[sequence], self._mapping.read(tokens)
            fits = self.max_length is None or row.num_own + len(draft_tokens) <= self.max_length
            readable[sequence] = draft_tokens if fits else ()
            row.text.extend(tokens if fits else ())
            row.num_own += len(readable[sequence])
        return readable

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        logits = self._model.extend(
            {sequence: self._own_block(sequence, block) for sequence, block in blocks.items()}
        )
        answers: dict[int, Tensor] = {}
        for sequence, block in blocks.items():
            row, row_logits = self._rows[sequence], logits[sequence]
            first = row.num_slots - row_logits.shape[0]
            ends = [path[-1] - first for path in row.nodes[-len(block.token_ids) :]]
            row.logits = row_logits[ends[-1]]
            answers[sequence] = self._in_target_tokens(row_logits[ends])
        return answers

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        draft_paths: dict[int, tuple[int, ...]] = {}
        for sequence, path in paths.items():
            row = self._rows[sequence]
            draft_paths[sequence] = row.nodes[path[-1]] if path else ()
            row.text.extend(row.tokens[node] for node in path)
            row.num_own += len(draft_paths[sequence])
            row.nodes, row.tokens, row.num_slots = [], [], 0
        self._model.commit(draft_paths)

    def length(self, sequence: int) -> int:
        return len(self._rows[sequence].text)

    def close(self, sequence: int) -> None:
        del self._rows[sequence]
        self._model.close(sequence)

    def continuations(self, counts: Mapping[int, int]) -> Mapping[int, tuple[int, ...]]:
        """See `ForeignModel`."""
        written: dict[int, list[int]] = {sequence: [] for sequence in counts}
        if self.max_length is not None:  # the last token is not read
            counts = {
                sequence: min(count, self.max_length - self._rows[sequence].num_own + 1)
                for sequence, count in counts.items()
            }
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
            sequence: self._retokenised(self._rows[sequence].text, tokens)
            for sequence, tokens in written.items()
        }

    def _own_block(self, sequence: int, block: NodeBlock) -> NodeBlock:
        row = self._rows[sequence]
        tokens: list[int] = []
        parents: list[int] = []
        for token, parent in zip(block.token_ids, block.parents, strict=True):
            above = row.nodes[parent] if parent >= 0 else ()
            slots = list(above)
            for draft_token in self._mapping.written[token]:
                parents.append(slots[-1] if slots else -1)
                tokens.append(draft_token)
                slots.append(row.num_slots)
                row.num_slots += 1
            row.nodes.append(tuple(slots))
            row.tokens.append(token)
        length = row.num_own + max(map(len, row.nodes))
        if self.max_length is not None and length > self.max_length:
            raise ContextLengthError(
                f"the text's {len(row.text)} tokens are {length} of the draft model's, which "
                f"reads {self.max_length}"
            )
        return NodeBlock(tuple(tokens), tuple(parents))

    def _in_target_tokens(
        self, logits: Float[Tensor, "nodes draft_vocab"]
    ) -> Float[Tensor, "nodes vocab"]:
        target_ids, draft_ids = self._shared.to(logits.device)
        answers = logits.new_full((logits.shape[0], self.vocab_size), -math.inf)
        answers[:, target_ids] = logits[:, draft_ids]
        return answers

    def _retokenised(self, text: Sequence[int], new_tokens: Sequence[int]) -> tuple[int, ...]:
        new = self._draft_tokenizer.decode(list(new_tokens), skip_special_tokens=True).rstrip(
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
