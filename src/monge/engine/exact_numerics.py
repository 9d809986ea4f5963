"""Whether the logits of a network depend on what else its forwards read."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Final

import torch
from torch import Tensor

from monge.core.errors import UnsupportedModelError
from monge.core.model import NodeBlock, SequenceModel

_PROMPTS: Final = (5, 40, 150)  # tokens of the trial's texts
_WIDTHS: Final = ((4, 8, 2), (1, 3, 5), (6, 1, 4), (2, 2, 2))  # tokens of each text, by forward
_IDS: Final = count(-2_000_000, -1)  # below those of real requests


def check_exact_numerics(model: SequenceModel) -> None:
    """Compare the logits of texts that are read in blocks and together with those of texts read alone, token by token.

    Args:
        model: A network.

    Raises:
        UnsupportedModelError: If a logit differs in any bit.
    """
    if model.no_draft_reason is not None:
        return  # every forward reads one token of a text
    longest = min(model.max_length or 1 << 20, max(_PROMPTS) + sum(map(max, _WIDTHS)))
    texts = [
        [(31 * place * place + 7 * place + row) % model.vocab_size for place in range(longest)]
        for row in range(len(_PROMPTS))
    ]
    starts = [min(start, longest - sum(map(max, _WIDTHS))) for start in _PROMPTS]
    together = _read(model, texts, starts, _WIDTHS)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        total = sum(widths[row] for widths in _WIDTHS)
        (alone,) = _read(model, [text], [start], [(1,)] * total)
        if not torch.equal(alone, together[row]):
            difference = float((alone - together[row]).abs().max())
            raise UnsupportedModelError(
                f"exact_numerics: logits of {model!r} depend on how many tokens and requests a "
                f"forward reads (by {difference:.1e} in a trial), so greedy text can differ at "
                "near-ties; use backend=\"compiled(weights='int8')\" on a CPU, or leave "
                "exact_numerics out"
            )


def _read(
    model: SequenceModel,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    widths: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Logits after every token behind the starts, by text; the texts share their forwards."""
    ids = [next(_IDS) for _ in texts]
    model.open({one: text[:start] for one, text, start in zip(ids, texts, starts, strict=True)})
    try:
        found: list[list[Tensor]] = [[] for _ in texts]
        for blocks in _blocks(ids, texts, starts, widths):
            logits = model.extend(blocks)
            for own, one in zip(found, ids, strict=True):
                own.append(logits[one])
            model.commit({one: range(len(block.token_ids)) for one, block in blocks.items()})
    finally:
        for one in ids:
            model.close(one)
    return [torch.cat(own) for own in found]


def _blocks(
    ids: Sequence[int],
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    widths: Sequence[Sequence[int]],
) -> Iterator[Mapping[int, NodeBlock]]:
    at = list(starts)
    for counts in widths:
        yield {
            one: NodeBlock.chain(tuple(text[place : place + width]))
            for one, text, place, width in zip(ids, texts, at, counts, strict=True)
        }
        at = [place + width for place, width in zip(at, counts, strict=True)]
