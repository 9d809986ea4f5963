"""A check that the logits of a network do not depend on what else its forwards read."""

from collections.abc import Sequence
from itertools import count
from typing import Final

import torch
from torch import Tensor

from monge.core.errors import UnsupportedModelError
from monge.networks.base import NodeBlock, SequenceModel, draft_length

_PROMPTS: Final = (5, 440, 450)  # tokens of the trial's texts
_WIDTHS: Final = ((4, 8, 2), (1, 3, 5), (6, 1, 4), (2, 2, 2))  # tokens of each text, by forward
_IDS: Final = count(-2_000_000, -1)  # below those of real requests


def check_batch_invariance(model: SequenceModel) -> None:
    """Compare the logits of texts that are read in blocks and together with those of texts read alone, token by token.

    Every second block is a tree if the network reads trees.

    Raises:
        UnsupportedModelError: If a logit differs in any bit.
    """
    if model.why_no_draft is not None:
        return  # every forward reads one token of a text
    longest = min(draft_length(model) or 1 << 20, max(_PROMPTS) + sum(map(max, _WIDTHS)))
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
                f"batch_invariant: logits of {model!r} depend on how many tokens and requests a "
                f"forward reads (by {difference:.1e} in a trial), so greedy text can differ at "
                "near-ties; use backend='compiled' with float32 on a CPU, or leave batch_invariant out"
            )


def _read(
    model: SequenceModel,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    widths: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Logits after every token that follows the starts, by text; the texts share their forwards."""
    ids = [next(_IDS) for _ in texts]
    model.open(
        {sequence: text[:start] for sequence, text, start in zip(ids, texts, starts, strict=True)}
    )
    at = list(starts)
    rows: list[list[Tensor]] = [[] for _ in texts]
    try:
        for forward, counts in enumerate(widths):
            branches = forward % 2 == 1 and model.why_no_tree is None
            blocks: dict[int, NodeBlock] = {}
            paths: dict[int, Sequence[int]] = {}
            for sequence, text, place, width in zip(ids, texts, at, counts, strict=True):
                tokens = text[place : place + width]
                blocks[sequence], paths[sequence] = (
                    _tree(tokens, model.vocab_size)
                    if branches
                    else (
                        NodeBlock.chain(tuple(tokens)),
                        range(width),
                    )
                )
            logits = model.extend(blocks)
            for parts, sequence in zip(rows, ids, strict=True):
                parts.append(logits[sequence][list(paths[sequence])])
            model.commit(paths)
            at = [place + width for place, width in zip(at, counts, strict=True)]
    finally:
        for sequence in ids:
            model.close(sequence)
    return [torch.cat(parts) for parts in rows]


def _tree(tokens: Sequence[int], vocab_size: int) -> tuple[NodeBlock, Sequence[int]]:
    """A path of these tokens in which every node follows a sibling, and the places of its nodes."""
    both = [each for token in tokens for each in ((token + 1) % vocab_size, token)]
    parents = [place - 1 - place % 2 for place in range(len(both))]
    return NodeBlock(tuple(both), tuple(parents)), range(1, len(both), 2)
