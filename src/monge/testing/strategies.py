"""Hypothesis strategies for laws and trees: zeros, ties, point masses, equal and disjoint supports."""

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import torch

from monge.core.law import DenseLaw


def weights(vocab_size: int) -> SearchStrategy[list[int]]:
    """Small integer weights, not all zero: many zeros and ties."""
    return st.lists(st.integers(0, 6), min_size=vocab_size, max_size=vocab_size).filter(any)


def dense_law(values: list[int]) -> DenseLaw:
    """The law proportional to integer weights."""
    total = sum(values)
    return DenseLaw(torch.tensor([value / total for value in values], dtype=torch.float64))


@st.composite
def law_pairs(draw: DrawFn, max_vocab: int = 5) -> tuple[DenseLaw, DenseLaw]:
    """A target and a draft law over one vocabulary: unrelated, equal, or of disjoint supports."""
    vocab_size = draw(st.integers(2, max_vocab))
    p = draw(weights(vocab_size))
    relation = draw(st.sampled_from(["unrelated", "equal", "disjoint"]))
    if relation == "equal":
        q = p
    elif relation == "disjoint" and 0 in p:
        q = [int(value == 0) for value in p]
    else:
        q = draw(weights(vocab_size))
    return dense_law(p), dense_law(q)
