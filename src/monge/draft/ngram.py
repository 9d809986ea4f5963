"""Prompt lookup: propose what followed the last occurrence of the text's own ending."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.proposal import Deterministic
from monge.core.tree import GrowingTree
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, Drafter

_TYPECODE: Final = "q"
_WIDTH: Final = array(_TYPECODE).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafter(Drafter[bytes]):
    """Prompt lookup: copy what followed the latest earlier occurrence of the last few tokens.

    The longest matching ending wins, among equals the most recent occurrence. The candidates are a function of the committed
    text, so they are `Deterministic` and any verifier that takes deterministic candidates is exact. State: the text as bytes,
    which makes the search one call of a compiled substring search.

    Args:
        num_draft_tokens: Length of the copied continuation.
        max_ngram: Longest ending that is looked up, in tokens.
        min_ngram: Shortest one.

    Reference:
        Saxena, "Prompt lookup decoding" (2023); LLMA (Yang et al., arXiv 2304.04487).
    """

    num_draft_tokens: int = 8
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise OptionError(f"ngram: num_draft_tokens must be at least 1; got {self.num_draft_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(f"ngram: need 1 <= min_ngram <= max_ngram; got {self.min_ngram} and {self.max_ngram}")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            proposes=frozenset({Deterministic}),
            max_width=1,
            max_depth=self.num_draft_tokens,
            needs_trees=False,
            reads_text=True,
        )

    def open(self, contexts: Sequence[Context]) -> Sequence[bytes]:
        return [_packed(context.token_ids) for context in contexts]

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[bytes],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[bytes]]:
        drafts: list[Draft[bytes]] = []
        for context, state, plan, row_draws in zip(contexts, states, plans, draws, strict=True):
            tree, text = GrowingTree(context.token_ids[-1]), _up_to_date(state, context)
            node = 0
            for token in self._continuation(text, plan.nodes(plan.depth(self.num_draft_tokens))):
                (node,) = tree.grow(node, Deterministic((token,)), row_draws)
            drafts.append(Draft(tree.finish(), text))
        return drafts

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[bytes]], verdicts: Sequence[Verdict]
    ) -> Sequence[bytes]:
        return [_up_to_date(draft.state, context) for context, draft in zip(contexts, drafts, strict=True)]

    def close(self, context: Context) -> None:
        return None

    def _continuation(self, text: bytes, count: int) -> tuple[int, ...]:
        if count == 0:
            return ()
        num_tokens = len(text) // _WIDTH
        for size in range(min(self.max_ngram, num_tokens - 1), self.min_ngram - 1, -1):
            start = _last_match(text, text[-size * _WIDTH :], before=len(text) - _WIDTH)
            if start is not None:
                after = start + size * _WIDTH
                return tuple(array(_TYPECODE, text[after : after + count * _WIDTH]))
        return ()


def _up_to_date(text: bytes, context: Context) -> bytes:
    """The text with what was committed since it was packed."""
    since = context.token_ids[len(text) // _WIDTH :]
    return text + _packed(since) if since else text


def _packed(token_ids: Sequence[int]) -> bytes:
    return array(_TYPECODE, token_ids).tobytes()


def _last_match(text: bytes, ending: bytes, before: int) -> int | None:
    """Offset of the last occurrence that ends at or before byte `before` and lies on a token boundary."""
    offset = text.rfind(ending, 0, before)
    while offset >= 0 and offset % _WIDTH:
        offset = text.rfind(ending, 0, offset + len(ending) - 1)
    return offset if offset >= 0 else None
