"""Laws for hypothesis: small vocabularies with zeros, ties, tiny masses and disjoint supports."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

few = settings(derandomize=True, deadline=None, max_examples=25)
very_few = settings(derandomize=True, deadline=None, max_examples=10)

WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 7.0, 0.31, 1e-3, 1e-9])


def as_law(weights):
    weights = np.array(weights, dtype=np.float64)
    return weights / weights.sum()


def laws(size):
    return st.lists(WEIGHTS, min_size=size, max_size=size).filter(any).map(as_law)


@st.composite
def pairs(draw, max_tokens=5, max_width=3):
    """(p, q, width)."""
    size = draw(st.integers(1, max_tokens))
    return draw(laws(size)), draw(laws(size)), draw(st.integers(1, max_width))


def half(*, tokens, inside):
    """Uniform over one half of the vocabulary: two of them make disjoint supports."""
    law = np.zeros(tokens)
    law[:inside] = 1.0 / inside
    return law


A = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]))

EDGES = {
    "equal": (A[0], A[0], 2),
    "equal_uniform": (np.full(4, 0.25), np.full(4, 0.25), 3),
    "disjoint": (half(tokens=4, inside=2), half(tokens=4, inside=2)[::-1].copy(), 2),
    "one_candidate": (*A, 1),
    "always_accepted": (np.array([0.5, 0.5]), np.array([7.0, 8.0]) / 15.0, 2),
    "draft_is_a_point": (A[0], np.array([0.0, 1.0, 0.0]), 3),
    "target_is_a_point": (np.array([0.0, 1.0, 0.0]), A[1], 2),
    "one_token": (np.ones(1), np.ones(1), 2),
    "tied_ratios": (np.array([0.0, 0.5, 0.5]), np.array([0.31, 0.345, 0.345]), 2),
    "tied_everywhere": (np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.2, 0.1, 0.4, 0.3]), 3),
    "many_candidates": (*A, 7),
    "window_at_threshold": (np.array([0.0, 0.5, 0.5]), np.array([6.0, 6.5, 6.5]) / 19.0, 2),
    "almost_tied": (np.array([0.5, 0.5 - 1e-9, 1e-9]), np.array([0.4, 0.4, 0.2]), 2),
}
