"""Prompt lookup: which ending, which occurrence, and what is copied of a text that goes in circles."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.draft.ngram import Ngram
from tests.control.scripts import draws
from tests.draft.lookups import looked_up


def drafted(ngram: Ngram, text: tuple[int, ...], plan: DraftPlan | None = None) -> tuple[int, ...]:
    context = Context(request_id=0, token_ids=text, num_prompt_tokens=1, rules=SamplingRules())
    (state,) = ngram.open([context])
    (draft,) = ngram.draft([context], [state], [plan or DraftPlan()], [draws()])
    assert draft.tree.is_chain
    return draft.tree.token_ids[1:]


TOKENS = st.integers(0, 4)
CIRCLES = st.tuples(
    st.lists(TOKENS, max_size=5), st.lists(TOKENS, min_size=1, max_size=6), st.integers(1, 5)
).map(lambda parts: [*parts[0], *parts[1] * parts[2], *parts[1][: len(parts[1]) // 2]])


@given(
    CIRCLES | st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(1, 9),
)
@example([1, 1], 1, 0, 3)
@example([256, 1, 256], 1, 2, 3)  # equal bytes across the boundary of two tokens
def test_it_is_the_latest_occurrence_of_the_longest_ending(
    text: list[int], shortest: int, more: int, count: int
) -> None:
    ngram = Ngram(num_draft_tokens=count, min_ngram=shortest, max_ngram=shortest + more)
    assert drafted(ngram, tuple(text)) == looked_up(ngram, tuple(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((9, 1, 2, 3, 1, 2, 3), (1, 2, 3, 1, 2, 3, 1, 2)),  # gone through twice
        ((9, 1, 2, 3, 4, 1, 2), (3, 4, 1, 2)),  # once and a half
        ((1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2), (3, 4, 5, 6, 7, 8, 9, 1)),
        ((5, 5), (5,) * 8),
        ((5, 5, 5), (5,) * 8),
        ((1, 2, 3), ()),
        ((7,), ()),
    ],
)
def test_a_text_that_went_in_a_circle_twice_is_expected_to_go_on(
    text: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert drafted(Ngram(), text) == expected


def test_no_more_is_copied_than_the_plan_asks_for() -> None:
    assert drafted(Ngram(), (5, 5, 5), DraftPlan(max_depth=2)) == (5, 5)
    assert drafted(Ngram(), (5, 5, 5), DraftPlan(max_depth=0)) == ()
