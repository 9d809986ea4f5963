"""Prompt lookup: propose what followed the last occurrence of the text's own ending."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.setting_types import check_bounds
from monge.core.verdict import Verdict
from monge.draft.base import Capabilities, Draft, ModelFreeDrafter, model_free
from monge.laws.draws import Draws
from monge.laws.tree import TokenTree, fixed_chain

_TYPECODE: Final = "q"
_WIDTH: Final = array(_TYPECODE).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngram(ModelFreeDrafter[bytes]):
    """Prompt lookup: copy what followed the latest earlier occurrence of the last few tokens.

    The longest match wins, and of equally long matches the most recent. If a match reaches the end
    of the text after a repetition, the repetition is continued. The candidates are a function of
    the committed text (`Deterministic`). State: the text as bytes, for a compiled substring search.

    Args:
        num_draft_tokens: Length of the copied continuation.
        max_ngram: Longest match, in tokens.
        min_ngram: Shortest match.

    Reference:
        Saxena, "Prompt lookup decoding" (2023); LLMA (Yang et al., arXiv 2304.04487).
    """

    num_draft_tokens: int = 8
    max_ngram: int = 16
    min_ngram: int = 1

    def __post_init__(self) -> None:
        check_bounds("ngram", num_draft_tokens=self.num_draft_tokens)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(
                f"ngram: need 1 <= min_ngram <= max_ngram; got {self.min_ngram} and "
                f"{self.max_ngram}"
            )

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=self.num_draft_tokens)

    def start(self, context: Context) -> bytes:
        return _packed(context.token_ids)

    def tree(self, context: Context, state: bytes, plan: DraftPlan, draws: Draws) -> TokenTree:
        text = _up_to_date(state, context)
        continuation = self._continuation(text, plan.nodes(plan.depth(self.num_draft_tokens)))
        return fixed_chain(context.token_ids[-1], continuation)

    def follow(self, context: Context, draft: Draft[bytes], verdict: Verdict) -> bytes:
        return _up_to_date(draft.state, context)

    def _continuation(self, text: bytes, count: int) -> tuple[int, ...]:
        if count == 0 or (start := self._place(text)) is None:
            return ()
        return tuple(array(_TYPECODE, _copied(text, start, count * _WIDTH)))

    def _place(self, text: bytes) -> int | None:
        """Return the end of the latest earlier occurrence of the longest match, or `None`."""
        size, longest, end = (
            self.min_ngram * _WIDTH,
            min(self.max_ngram * _WIDTH, len(text) - _WIDTH),
            None,
        )
        before = len(text) - _WIDTH
        while size <= longest:
            start = _last_match(text, text[len(text) - size :], before)
            if start is None:
                break
            # The tokens before it may match too. A longer match can only be further back.
            before = end = start + size
            while (
                size < longest
                and start
                and text[start - _WIDTH : start] == text[len(text) - size - _WIDTH :][:_WIDTH]
            ):
                size, start = size + _WIDTH, start - _WIDTH
            size += _WIDTH
        return end


def _copied(text: bytes, start: int, length: int) -> bytes:
    """Return the tokens after `start`, continued as a cycle if the text has just repeated them."""
    copied, cycle = text[start : start + length], len(text) - start
    if len(copied) == length or text[start - cycle : start] != copied:
        return copied
    return (copied * (length // cycle + 1))[:length]


def _up_to_date(text: bytes, context: Context) -> bytes:
    """Return the text with the tokens that were committed since it was packed."""
    since = context.token_ids[len(text) // _WIDTH :]
    return text + _packed(since) if since else text


def _packed(token_ids: Sequence[int]) -> bytes:
    return array(_TYPECODE, token_ids).tobytes()


def _last_match(text: bytes, ending: bytes, before: int) -> int | None:
    """Return the offset of the last occurrence on a token boundary up to `before`."""
    offset = text.rfind(ending, 0, before)
    while offset >= 0 and offset % _WIDTH:
        offset = text.rfind(ending, 0, offset + len(ending) - 1)
    return offset if offset >= 0 else None
