"""Which rounds the table of costs learns from."""

import math

import pytest

from monge.control.cost_model import CostModel
from monge.control.cost_watch import WARM
from tests.control.cost_scripts import kind, meet, table, timing

DRAFT = timing(4, 1.4, depth=4, draft_s=0.4)
PLAIN = timing(0, 1.0)


def settled() -> CostModel:
    """A table that has learnt from many rounds, of a second each, the last of them plain."""
    costs = table()
    meet(costs, DRAFT, *[PLAIN] * (64 + WARM))
    return costs


def going_on() -> CostModel:
    """The same, where drafting has gone on for a while: it is not learnt from every round since a rest."""
    costs = settled()
    meet(costs, *[DRAFT] * 16)
    return costs


def test_plain_rounds_behind_a_draft_say_nothing_about_plain_decoding() -> None:
    costs, slow = table(), timing(0, 1.3)
    for _ in range(20):
        meet(costs, DRAFT, *[slow] * WARM)
    assert costs.verify_s(0) == pytest.approx(1.0)
    meet(costs, slow)
    assert costs.verify_s(0) > 1.01


def test_plain_rounds_behind_lookups_do() -> None:
    """These run no network, so that the target's weights and shapes are at hand as before."""
    costs, looked_up = settled(), timing(4, 1.4)
    for _ in range(20):
        meet(costs, looked_up, timing(0, 1.3))
    assert costs.verify_s(0, 1, 0) > 1.25


@pytest.mark.parametrize("drafters", [(), (None,)])
def test_first_rounds_of_requests_say_nothing(drafters: tuple[None, ...]) -> None:
    costs = settled()
    assert not any(costs.is_due(kind(*drafters, num_before=number), 1.0) for number in range(3))
    assert not drafters or costs.is_due(kind(*drafters, num_before=3), 1.0)


def test_of_short_rounds_that_are_alike_one_in_sixty_milliseconds_is_learnt_from() -> None:
    costs = settled()
    assert [costs.is_due(kind(), 0.018) for _ in range(8)] == [False, False, False, True] * 2
    assert all(costs.is_due(kind(), 0.061) for _ in range(8))


def test_rounds_of_every_kind_are_learnt_from_that_often_however_they_take_turns() -> None:
    costs = going_on()
    costs.is_due(kind(), 0.06)
    kinds = [kind(None), kind("small"), kind("large"), kind("small", "large")]
    for _ in range(2):
        assert all(costs.is_due(one, 0.001) for one in kinds)
        assert not any(costs.is_due(one, 0.001) for one in (*kinds, *kinds))
        costs.is_due(kind(), 0.06)
    assert costs.is_due(kind(None, as_one=True), 0.0)


def test_what_drafts_say_of_plain_rounds_is_in_doubt_until_one_is_learnt_from() -> None:
    """Drafts that cost more than the table says may mean a slower machine, or a wrong table: only plain rounds tell."""
    costs, slow = table(), timing(4, 2.1, depth=4, draft_s=0.4)
    meet(costs, *[slow] * 511)
    assert costs.verify_s(0, 1, 0) > 1.05
    assert not costs.wants_plain, "not so soon again"
    meet(costs, slow)
    assert costs.wants_plain
    meet(costs, *[PLAIN] * WARM)
    assert costs.wants_plain, "these follow a draft"
    meet(costs, PLAIN)
    assert not costs.wants_plain


def test_plain_rounds_are_in_doubt_where_nobody_has_looked_for_long() -> None:
    costs = table()
    meet(costs, *[DRAFT] * 1023)
    assert not costs.wants_plain
    meet(costs, DRAFT)
    assert costs.wants_plain


def test_plain_rounds_are_not_asked_for_in_vain() -> None:
    """Requests of three rounds have none that teaches, and are not decoded plainly for ever because of that."""
    costs = table()
    meet(costs, *[DRAFT] * 1024)
    assert costs.wants_plain
    asked = 0
    while costs.wants_plain:
        assert not costs.is_due(kind(num_before=asked % 3), 1.0)
        asked += 1
    assert asked == 4 * WARM
    meet(costs, *[DRAFT] * 1000)
    assert not costs.wants_plain


def test_a_plain_round_is_learnt_from_at_once_where_drafts_have_moved_what_it_is_taken_to_cost() -> None:
    costs = settled()
    assert not costs.is_due(kind(), 0.001)
    assert costs.is_due(kind("first"), 0.001)
    assert costs.is_due(kind(None), 0.001)
    costs.observe(timing(4, 2.0, depth=4, draft_s=0.4))
    assert not any(costs.is_due(kind(), 0.001) for _ in range(WARM))
    assert costs.is_due(kind(), 0.001)
    before = costs.verify_s(0, 1, 0)
    costs.observe(PLAIN)
    assert costs.verify_s(0, 1, 0) < before
    assert not costs.is_due(kind(), 0.001)


def test_a_table_that_does_not_learn_asks_for_nothing() -> None:
    costs = CostModel.linear(plain=1.0, node=0.1, draft=0.2)
    meet(costs, *[DRAFT] * 2000)
    assert not costs.wants_plain
    assert costs.num_rounds == 2000


def test_a_rest_that_was_not_learnt_from_is_a_rest() -> None:
    """The first draft after it finds nothing at hand, as after one whose rounds were all observed."""
    costs = settled()
    before = costs.round_s(4)
    assert not any(costs.is_due(kind(), 0.001) for _ in range(4))
    meet(costs, timing(4, 2.4, depth=4, draft_s=0.9))
    assert costs.round_s(4) == pytest.approx(before)
    assert costs.catch_up_s == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, math.nan])
def test_plain_rounds_whose_time_is_none_end_the_doubt_too(seconds: float) -> None:
    """Else a broken clock would keep drafting off."""
    costs = table()
    meet(costs, *[DRAFT] * 1024)
    assert costs.wants_plain
    meet(costs, *[timing(0, seconds)] * (WARM + 1))
    assert not costs.wants_plain


def test_after_a_long_rest_every_round_as_one_is_learnt_from_for_a_while() -> None:
    """There may be few before the next rest, which they decide about; those of stages would move what plain rounds cost."""
    costs, whole = going_on(), kind(None, as_one=True)
    assert [costs.is_due(whole, 0.001) for _ in range(20)] == [True, True] + [False] * 18, "a cold one and a warm one"
    for _ in range(63):
        costs.is_due(kind(), 0.0005)
    assert [costs.is_due(whole, 0.001) for _ in range(4)] == [False] * 4, "a short rest"
    for _ in range(64):
        costs.is_due(kind(), 0.001)
    assert [costs.is_due(whole, 0.001) for _ in range(20)] == [True] * 16 + [False] * 4
    for _ in range(64):
        costs.is_due(kind(), 0.001)
    assert [costs.is_due(kind(None), 0.001) for _ in range(20)] == [True, True] + [False] * 18


def test_a_cold_round_takes_no_warm_ones_turn() -> None:
    costs = going_on()
    for _ in range(20):
        costs.is_due(kind(), 0.06)
    assert [costs.is_due(kind(None), 0.001) for _ in range(3)] == [True, True, False], "the first reads what was missed"
    as_one = [kind(None, as_one=True)] * 4
    assert [costs.is_due(one, 0.001) for one in as_one] == [True, True, False, False], "its code is not at hand at first"


def test_cold_rounds_are_learnt_from_four_times_as_rarely() -> None:
    """They are believed only where they are shorter than expected."""
    costs, whole, cold, warm = going_on(), kind(None, as_one=True), list[bool](), list[bool]()
    for _ in range(12):
        cold.append(costs.is_due(whole, 0.03))
        warm.append(costs.is_due(whole, 0.03))
        for _ in range(2):
            costs.is_due(kind(None), 0.0)
    assert all(warm)
    assert cold == [True, False, False, False] * 3


@pytest.mark.parametrize("num_rounds", [1, 5, 15])
def test_rounds_in_the_middle_of_a_rest_may_be_noted_at_once(num_rounds: int) -> None:
    one_by_one, at_once = settled(), settled()
    for costs in (one_by_one, at_once):
        meet(costs, DRAFT, *[PLAIN] * (64 + WARM))
        costs.is_due(kind("ngram", runs_network=False), 0.003)
    for _ in range(num_rounds):
        assert not one_by_one.is_due(kind(), 0.003)
    assert at_once.pass_over(num_rounds, 0.003 * num_rounds)
    # What the next round is told apart by: who drafted in the two before it, and whether it comes behind a rest.
    assert at_once._watch.went_on("ngram") == one_by_one._watch.went_on("ngram") == (num_rounds == 1)
    for another in (kind(), kind(None), kind(None, as_one=True), kind(None), kind()):
        for seconds in (0.0, 0.03, 0.02):
            assert at_once.is_due(another, seconds) == one_by_one.is_due(another, seconds)
            known, expected = vars(at_once._watch), vars(one_by_one._watch)
            assert known["_last"] == expected["_last"]
            numbers = [name for name in expected if name not in {"_before", "_last", "_due_s"}]
            assert {name: known[name] for name in numbers} == pytest.approx({name: expected[name] for name in numbers})


def test_rounds_that_may_be_news_are_noted_one_by_one() -> None:
    first = table()
    meet(first, *[PLAIN] * 40)
    assert not first.pass_over(3, 0.1), "the first ones of a table"
    behind = settled()
    meet(behind, DRAFT, *[PLAIN] * (3 * WARM))
    assert not behind.pass_over(3, 0.1), "those soon after a draft"
    moved = settled()
    before = moved.num_rounds
    moved._watch.learnt(0.1, is_plain=False)
    assert not moved.pass_over(3, 0.1), "where drafts have moved what plain rounds are taken to cost"
    assert moved.num_rounds == before
    assert settled().pass_over(3, 0.1)
