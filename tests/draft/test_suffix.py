"""The suffix drafter against counts made by hand and by brute force."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.core.tree import TokenTree
from monge.draft.suffix import SuffixDrafter, SuffixIndex
from tests.draft.test_learners import context, opened
from tests.draft.test_learners import drafted as drafted_from

TEXTS = st.lists(st.integers(0, 2), min_size=2, max_size=24)


def drafted(
    drafter: SuffixDrafter, tokens: Sequence[int], plan: DraftPlan | None = None
) -> TokenTree:
    return drafted_from(drafter, opened(drafter, tokens), tokens, plan).tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tree.path_tokens(node) for node in range(1, tree.num_nodes)]


@given(text=TEXTS, max_match=st.integers(1, 6))
def test_matches_are_the_earlier_occurrences_of_the_ending(text: list[int], max_match: int) -> None:
    index = SuffixIndex()
    index.extend(text)
    expected: list[tuple[int, list[int]]] = []
    for length in range(1, min(max_match, len(text)) + 1):
        ending = text[-length:]
        ends = range(len(text) - 1, length - 1, -1)
        places = [end for end in ends if text[end - length : end] == ending]
        if places and expected and len(expected[-1][1]) == len(places):
            expected.pop()
        if places:
            expected.append((length, places))
    assert index.matches(text, max_match) == expected[::-1]


@given(text=TEXTS, depth=st.integers(1, 3))
def test_shares_are_counts_of_what_followed(text: list[int], depth: int) -> None:
    index = SuffixIndex()
    index.extend(text)
    for length, places in index.matches(text, 4):
        found = index.continuations(places, num_nodes=99, depth=depth, width=9, min_share=0.0)
        counts: dict[tuple[int, ...], int] = {}
        for place in places:
            for size in range(1, depth + 1):
                if place + size <= len(text):
                    path = tuple(text[place : place + size])
                    counts[path] = counts.get(path, 0) + 1
        shares = {path: count / len(places) for path, count in counts.items()}
        assert found == pytest.approx(shares), length
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_worked_example() -> None:
    """After "1 2" came 3 twice (once 3 4, once 3 5) and 6 once.

    The last 1 2 has no continuation yet.
    """
    text = [1, 2, 3, 4, 1, 2, 6, 1, 2, 3, 5, 1, 2]
    tree = drafted(SuffixDrafter(depth=2, min_share=0.1), text)
    assert paths(tree)[:2] == [(3,), (6,)]
    assert set(paths(tree)) == {(3,), (6,), (3, 5), (3, 4), (6, 1)}
    assert paths(drafted(SuffixDrafter(depth=2, min_share=0.5), text)) == [(3,)]
    assert paths(drafted(SuffixDrafter(depth=3, width=1), text)) == [(3,), (3, 5), (3, 5, 1)]


def test_long_matches_earn_long_drafts() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3]
    assert drafted(SuffixDrafter(nodes_per_token=1.0), text).num_nodes == 1 + 3
    assert drafted(SuffixDrafter(nodes_per_token=2.0), text).num_nodes == 1 + 6
    limited = drafted(SuffixDrafter(nodes_per_token=2.0), text, DraftPlan(max_nodes=2))
    assert limited.num_nodes == 1 + 2
    assert drafted(SuffixDrafter(), text, DraftPlan(max_depth=0)).num_nodes == 1
    assert drafted(SuffixDrafter(), [1, 2, 3]).num_nodes == 1, "there is no match"


def test_earlier_requests_are_remembered_only_if_asked_and_the_oldest_go_first() -> None:
    first, second = context([1, 2, 3, 4, 5]), context([7, 8, 9, 9, 9])
    forgetful, attentive = SuffixDrafter(), SuffixDrafter(max_history=12)
    for drafter in (forgetful, attentive):
        drafter.close(first)
    assert drafted(forgetful, [0, 1, 2]).num_nodes == 1
    assert paths(drafted(attentive, [0, 1, 2])) == [(3,), (3, 4), (3, 4, 5)]
    attentive.close(second)
    assert paths(drafted(attentive, [0, 7, 8]))[0] == (9,)
    attentive.close(context([6, 5, 6, 5, 6]))
    # 18 tokens and ends are too many: the first text is gone
    assert drafted(attentive, [0, 1, 2]).num_nodes == 1
    assert paths(drafted(attentive, [0, 7, 8]))[0] == (9,)
    for _ in range(9):  # renumbered several times
        attentive.close(context([6, 4, 6, 4, 6]))
    assert paths(drafted(attentive, [0, 4, 6]))[0] == (4,)
    assert drafted(attentive, [0, 7, 8]).num_nodes == 1


def test_texts_do_not_run_into_each_other() -> None:
    drafter = SuffixDrafter(max_history=100)
    drafter.close(context([1, 2]))
    drafter.close(context([3, 4]))
    assert drafted(drafter, [0, 1, 2]).num_nodes == 1


@pytest.mark.parametrize(
    "bad",
    [
        *({"num_nodes": 0}, {"width": 0}, {"min_share": 1.5}),
        *({"nodes_per_token": 0.0}, {"max_history": -1}),
    ],
)
def test_bad_sizes_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="suffix: "):
        SuffixDrafter(**bad)  # type: ignore[arg-type]
