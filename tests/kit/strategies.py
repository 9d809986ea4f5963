"""Hypothesis strategies for laws and trees.

Zeros, ties, point masses, equal and disjoint supports.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from monge.laws.law import DenseLaw


def weight_lists(vocab_size: int) -> SearchStrategy[Any]:
    """Small integer weights, not all zero: many zeros and ties."""
    return st.lists(st.integers(0, 6), min_size=vocab_size, max_size=vocab_size).filter(any)


@st.composite
def weight_pairs(draw: Callable[..., Any], max_vocab: int = 5) -> tuple[Any, Any]:
    """Weights of a target and a draft law over one vocabulary.

    Unrelated, equal, or of disjoint supports.

    Weights, not laws: a run-time type checker looks at random elements of what it checks, and a
    strategy must not.
    """
    vocab_size = draw(st.integers(2, max_vocab))
    p = draw(weight_lists(vocab_size))
    relation = draw(st.sampled_from(["unrelated", "equal", "disjoint"]))
    if relation == "equal":
        return p, p
    if relation == "disjoint" and 0 in p:
        return p, [int(value == 0) for value in p]
    return p, draw(weight_lists(vocab_size))


def dense_law(weights: Sequence[int]) -> DenseLaw:
    """The law proportional to integer weights."""
    return DenseLaw(torch.tensor([value / sum(weights) for value in weights], dtype=torch.float64))
