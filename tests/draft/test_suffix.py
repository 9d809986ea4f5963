"""The suffix drafter against counts made by hand and by brute force."""

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.base import Draft
from monge.draft.suffix import Suffix
from monge.draft.text_history import SuffixIndex, TextHistory, continuations
from monge.laws.draws import TapeDraws
from monge.laws.tree import TokenTree, fixed_chain

TEXTS = st.lists(st.integers(0, 2), min_size=2, max_size=24)


REQUESTS = count()


def request(tokens: Sequence[int], num_prompt_tokens: int = 1) -> Context:
    return Context(
        request_id=next(REQUESTS),
        token_ids=tuple(tokens),
        num_prompt_tokens=num_prompt_tokens,
        rules=SamplingRules(),
    )


def drafted(
    drafter: Suffix,
    tokens: Sequence[int],
    plan: DraftPlan | None = None,
    num_prompt_tokens: int = 1,
) -> TokenTree:
    row = request(tokens, num_prompt_tokens)
    states = drafter.open([row])
    (draft,) = drafter.draft([row], states, [plan or DraftPlan()], [TapeDraws(())])
    return draft.tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tree.path_tokens(node) for node in range(1, tree.num_nodes)]


def trees(
    drafter: Suffix, rows: Sequence[Context], states: Sequence[SuffixIndex]
) -> list[list[tuple[int, ...]]]:
    drafts = drafter.draft(rows, states, [DraftPlan()] * len(rows), [TapeDraws(())] * len(rows))
    return [paths(draft.tree) for draft in drafts]


def plain(token: int) -> Verdict:
    return Verdict(path=(), next_token=token, next_kind="bonus", examined=())


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
    matches = [
        (length, [at for _, at in places]) for length, places in index.matches(text, max_match)
    ]
    assert matches == expected[::-1]


@given(text=TEXTS, depth=st.integers(1, 3))
def test_shares_are_counts_of_what_followed(text: list[int], depth: int) -> None:
    index = SuffixIndex()
    index.extend(text)
    for length, places in index.matches(text, 4):
        found = continuations(places, num_nodes=99, depth=depth, width=9, min_share=0.0)
        counts: dict[tuple[int, ...], int] = {}
        for _, place in places:
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
    tree = drafted(Suffix(depth=2, min_share=0.1), text)
    assert paths(tree)[:2] == [(3,), (6,)]
    assert set(paths(tree)) == {(3,), (6,), (3, 5), (3, 4), (6, 1)}
    assert paths(drafted(Suffix(depth=2, min_share=0.5), text)) == [(3,)]
    assert paths(drafted(Suffix(depth=3, width=1), text)) == [(3,), (3, 5), (3, 5, 1)]


def test_long_matches_earn_long_drafts() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3]
    assert drafted(Suffix(nodes_per_token=1.0), text).num_nodes == 1 + 3
    assert drafted(Suffix(nodes_per_token=2.0), text).num_nodes == 1 + 6
    limited = drafted(Suffix(nodes_per_token=2.0), text, DraftPlan(max_nodes=2))
    assert limited.num_nodes == 1 + 2
    assert drafted(Suffix(), text, DraftPlan(max_depth=0)).num_nodes == 1
    assert drafted(Suffix(), [1, 2, 3]).num_nodes == 1, "there is no match"


def test_earlier_requests_are_remembered_only_if_asked_and_the_oldest_go_first() -> None:
    first, second = request([1, 2, 3, 4, 5]), request([7, 8, 9, 9, 9])
    forgetful, attentive = Suffix(), Suffix(max_history=12)
    for drafter in (forgetful, attentive):
        drafter.close(first)
    assert drafted(forgetful, [0, 1, 2]).num_nodes == 1
    assert paths(drafted(attentive, [0, 1, 2])) == [(3,), (3, 4), (3, 4, 5)]
    attentive.close(second)
    assert paths(drafted(attentive, [0, 7, 8]))[0] == (9,)
    attentive.close(request([6, 5, 6, 5, 6]))
    # 15 tokens are too many: the first text is gone
    assert drafted(attentive, [0, 1, 2]).num_nodes == 1
    assert paths(drafted(attentive, [0, 7, 8]))[0] == (9,)
    for _ in range(9):
        attentive.close(request([6, 4, 6, 4, 6]))
    assert paths(drafted(attentive, [0, 4, 6]))[0] == (4,)
    assert drafted(attentive, [0, 7, 8]).num_nodes == 1


def test_texts_do_not_run_into_each_other() -> None:
    drafter = Suffix(max_history=100)
    drafter.close(request([1, 2]))
    drafter.close(request([3, 4]))
    assert drafted(drafter, [0, 1, 2]).num_nodes == 1


def test_requests_of_one_batch_draft_from_each_other_while_they_grow() -> None:
    drafter, prompt = Suffix(max_history=100), [1, 2, 3]
    rows = [request(prompt, 3), request(prompt, 3), request([4, 2, 3], 3)]
    states = drafter.open(rows)
    assert [len(trees(drafter, rows, states)[row]) for row in range(3)] == [0, 0, 0]
    for new in ((5,), (6,)):
        # Only the first request goes on; the others learn from it in every round.
        rows[0] = rows[0].append(new)
        drafter.observe(rows[:1], [Draft(fixed_chain(0, ()), states[0])], [plain(new[0])])
    assert trees(drafter, rows, states)[1:] == [[(5,), (5, 6)], [(5,), (5, 6)]]


def test_an_old_text_of_the_same_prompt_is_found_behind_many_others() -> None:
    drafter = Suffix(max_history=10_000, depth=2)
    drafter.close(request([1, 2, 3, 5, 6], 3))
    for _ in range(600):  # more than are looked at
        drafter.close(request([9, 3, 7, 7], 1))
    assert paths(drafted(drafter, [1, 2, 3], num_prompt_tokens=3)) == [(5,), (5, 6)]
    assert paths(drafted(drafter, [1, 8, 3], num_prompt_tokens=3)) == [(7,), (7, 7)]


def test_a_group_keeps_its_prompt_once_and_leaves_with_its_last_text() -> None:
    history = TextHistory()
    prompt, max_tokens = tuple(range(100)), 125
    rows = [request([*prompt, 100 + row], 100) for row in range(8)]
    for row in rows:
        history.follow(row, 2)
    assert len(history) == 0, "they run"
    for row in rows:
        history.finish(row, 2, max_tokens)
    assert len(history) == 101 + 7 * 3
    history.follow(again := request(prompt, 100), 2)
    group, every = history.indexes(again)
    history.finish(again, 2, max_tokens)
    for number in range(8):
        history.finish(request([300 + number] * 30), 2, max_tokens)
        assert len(history) <= max_tokens
    assert group.is_empty
    assert every.num_places == len(history)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=4))),
    dropped=st.sets(st.integers(0, 2)),
    ending=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_texts_that_grow_side_by_side_are_searched_as_if_each_stood_alone(
    pieces: list[tuple[int, list[int]]], dropped: set[int], ending: list[int]
) -> None:
    index, texts = SuffixIndex(), dict[int, list[int]]()
    for text, piece in pieces:
        index.extend(piece, text)
        texts.setdefault(text, []).extend(piece)
    for text in dropped:
        index.drop(text)
        texts.pop(text, None)
    for length, places in index.matches(ending, 4):
        tail = ending[-length:]
        expected = [
            (text, end)
            for text in texts.values()
            for end in range(length, len(text))
            if text[end - length : end] == tail
        ]
        assert sorted((list(tokens), at) for tokens, at in places) == sorted(expected)
    assert index.num_places == sum(map(len, texts.values()))


@pytest.mark.parametrize(
    "bad",
    [
        *({"num_nodes": 0}, {"width": 0}, {"min_share": 1.5}),
        *({"nodes_per_token": 0.0}, {"max_history": -1}),
    ],
)
def test_bad_sizes_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="suffix: "):
        Suffix(**bad)  # type: ignore[arg-type]
