"""What tokens spell, and how one vocabulary is written in another."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from monge.core.errors import VocabularyMismatchError

Spelling = bytes | str
"""The bytes of an ordinary token; the name of a special one, such as an end of text."""

_VISIBLE: Final = (
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
)
"""Bytes that a byte-level vocabulary writes as themselves.

The others follow from code point 256 on (GPT-2's alphabet).
"""


@dataclass(frozen=True, slots=True)
class VocabularyMapping:
    """How target tokens are written in the draft model's vocabulary.

    Args:
        shared: Tokens that both have, as target and draft ids.
        written: For every target token the draft tokens that spell it.
    """

    shared: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, ...], ...]

    def read(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """A text in draft tokens."""
        return tuple(own for token in token_ids for own in self.written[token])


def map_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, vocab_size: int, draft_vocab_size: int
) -> VocabularyMapping:
    """The mapping from the target's vocabulary to the draft model's.

    A token that the draft model lacks is written with its longest tokens, from the left; what has
    no spelling there (another family's special tokens) as its end of text.

    Args:
        target_tokenizer: The target's.
        draft_tokenizer: The draft model's.
        vocab_size: Tokens that have a logit in the target.
        draft_vocab_size: Likewise in the draft model.

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
            "nothing can be drafted "
            "across them; use another draft model"
        )
    end = getattr(draft_tokenizer, "eos_token_id", None)
    unknown = (int(end),) if end is not None else (shared[0][1],)
    longest = max((len(spelling) for spelling in own_id if isinstance(spelling, bytes)), default=0)
    written = tuple(
        _written(theirs.get(token), own_id, longest) or unknown for token in range(vocab_size)
    )
    return VocabularyMapping(shared, written)


def spellings(tokenizer: Any, whose: str) -> Mapping[int, Spelling]:
    """What every token of a tokenizer spells.

    Raises:
        VocabularyMismatchError: If it is of a kind whose tokens cannot be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyMismatchError(
            f"the {whose}'s tokenizer ({type(tokenizer).__name__}) does not say how its tokens "
            "are spelled; a fast tokenizer "
            "(tokenizer.json) is needed to draft across vocabularies"
        )
    parts = json.loads(backend.to_str())
    decoder = json.dumps(parts.get("decoder"))
    special = {int(added["id"]): str(added["content"]) for added in parts.get("added_tokens", ())}
    if '"ByteLevel"' in decoder:
        byte_of = _byte_level_alphabet()
        read = lambda piece: (  # noqa: E731
            bytes(byte_of[sign] for sign in piece)
            if all(sign in byte_of for sign in piece)
            else piece
        )
    elif "\N{LOWER ONE EIGHTH BLOCK}" in json.dumps(parts, ensure_ascii=False):
        read = _sentence_piece
    else:
        raise VocabularyMismatchError(
            f"the {whose}'s tokenizer is neither byte-level nor of SentencePiece's kind (decoder "
            f"{decoder[:80]}); drafting "
            "across vocabularies is not possible with it"
        )
    return {
        int(token): special.get(int(token)) or read(piece)
        for piece, token in tokenizer.get_vocab().items()
    }


def _byte_level_alphabet() -> Mapping[str, int]:
    hidden = [byte for byte in range(256) if byte not in _VISIBLE]
    return {chr(byte): byte for byte in _VISIBLE} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


def _sentence_piece(piece: str) -> Spelling:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _written(
    spelling: Spelling | None, own_id: Mapping[Spelling, int], longest: int
) -> tuple[int, ...]:
    """The spelling in draft tokens: the longest one that fits, again and again.

    Bytes that no token spells are left out.
    """
    if spelling is None or isinstance(spelling, str) or spelling in own_id:
        return () if spelling is None or spelling not in own_id else (own_id[spelling],)
    tokens: list[int] = []
    start = 0
    while start < len(spelling):
        fitting = (
            size
            for size in range(min(longest, len(spelling) - start), 0, -1)
            if spelling[start : start + size] in own_id
        )
        size = next(fitting, math.inf)
        if size < math.inf:
            tokens.append(own_id[spelling[start : start + int(size)]])
        start += int(size) if size < math.inf else 1
    return tuple(tokens)
