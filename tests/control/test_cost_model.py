"""The cost table: what it predicts, how it learns, what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.control.cost_model import CostModel
from monge.control.cost_nodes import Nodes
from monge.control.cost_table import checked, interpolated, row_of
from monge.core.errors import OptionError
from tests.control.cost_scripts import meet, table, timing


def test_linear_between_and_beyond_entries() -> None:
    costs = table()
    assert [costs.verify_s(nodes) for nodes in (0, 2, 4, 6, 10)] == pytest.approx([1.0, 1.2, 1.4, 1.8, 2.6])
    assert costs.round_s(0) == pytest.approx(1.0)
    assert costs.round_s(2) == pytest.approx(1.2 + 0.2)


def test_batches_and_context() -> None:
    costs = table(verify_s={1: {0: 1.0}, 5: {0: 3.0}}, context_s=0.001, base_context=100)
    assert costs.verify_s(0, 3, 100) == pytest.approx(2.0)
    assert costs.verify_s(0, 5, 1100) == pytest.approx(3.0 + 5.0)
    assert costs.verify_s(0, 9, 100) == pytest.approx(5.0)
    assert costs.verify_s(0, 1, 0) == pytest.approx(0.9)


def test_steps_of_compiled_graphs_are_kept() -> None:
    """Graphs hold 1, 4 and 8 tokens, the root among them: nodes cost what their graph costs, before and after corrections."""
    costs = table(verify_s={1: {0: 1.0, 3: 1.2, 7: 2.0}}, graph_sizes=(1, 4, 8))
    for _ in range(20):
        costs.observe(timing(2, 1.5))
        steps = [costs.verify_s(nodes) for nodes in range(8)]
        assert len(set(steps[1:4])) == 1
        assert len(set(steps[4:])) == 1
        assert steps[0] < steps[1] < steps[4]
    assert costs.verify_s(1, 1, 0) == pytest.approx(1.5, rel=0.1)


def test_trees_have_nodes_by_depth() -> None:
    costs = table(nodes=(0, 3, 9))
    assert [Nodes((0, 3, 9)).at(depth) for depth in range(5)] == [0, 3, 9, 10, 11]
    assert costs.round_s(2) == pytest.approx(costs.verify_s(9) + 0.2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.floats(1e-4, 10.0)), min_size=1, max_size=30))
def test_more_nodes_never_cost_less_whatever_is_measured(rounds: list[tuple[int, int, float]]) -> None:
    costs = table()
    for nodes, batch, seconds in rounds:
        costs.observe(timing(nodes, seconds, batch=batch))
        predicted = [costs.verify_s(count, batch) for count in range(12)]
        assert all(math.isfinite(value) and value > 0 for value in predicted)
        assert all(low <= high * (1 + 1e-12) for low, high in zip(predicted, predicted[1:], strict=False))


def test_the_table_follows_the_machine() -> None:
    costs = table()
    for _ in range(80):
        costs.observe(timing(4, 2.8, depth=4, draft_s=0.8))
        costs.observe(timing(0, 2.0))
        costs.observe(timing(4, 2.8, depth=4, draft_s=0.8))
    assert costs.verify_s(4, 1, 0) == pytest.approx(2.8, rel=0.05)
    assert costs.verify_s(0, 1, 0) == pytest.approx(2.0, rel=0.05)
    assert costs.draft_s(4) == pytest.approx(0.8, rel=0.05)


def test_long_texts_are_learnt_apart_and_plain_rounds_too() -> None:
    """The slope of plain rounds was measured ten times too steep, that of others is right; short texts are as they were."""
    costs = table(context_s=0.001, plain_context_s=0.01)
    for _ in range(3):
        costs.observe(timing(0, 1.5, context=500))
        costs.observe(timing(4, 1.9, depth=4, draft_s=0.4, context=500))
    assert costs.verify_s(0, 1, 500) == pytest.approx(1.5, rel=0.1)
    assert costs.verify_s(4, 1, 500) == pytest.approx(1.9, rel=0.1)
    assert costs.verify_s(0, 1, 10) == pytest.approx(1.1, rel=0.2)
    drafting, verifying = costs.levels_s(4, 1, 500)
    assert drafting[0] == 0.0
    assert verifying == sorted(verifying)


@pytest.mark.parametrize("drafts_before", [0, 1, 5])
def test_what_was_measured_on_a_busy_machine_does_not_stay_dear_unseen(drafts_before: int) -> None:
    """Costs of a busy machine, then rounds of a quiet one, all but the first of them plain: drafting got cheaper as well."""
    costs = table(verify_s={1: {0: 3.0, 4: 4.2}}, draft_s={1: {0: 0.0, 4: 1.2}})
    for _ in range(drafts_before):
        costs.observe(timing(4, 4.2, depth=4, draft_s=1.2))
    for _ in range(100):
        costs.observe(timing(0, 1.0))
    assert costs.verify_s(0, 1, 0) == pytest.approx(1.0, rel=0.05)
    assert costs.verify_s(4, 1, 0) == pytest.approx(1.4, rel=0.3)
    assert costs.draft_s(4) == pytest.approx(0.4, rel=0.5)


@pytest.mark.parametrize("drafts_before", [0, 5])
def test_a_faster_machine_is_one_piece_of_news_however_many_lengths_and_batches_tell_it(drafts_before: int) -> None:
    costs = table(verify_s={1: {0: 3.0, 4: 4.2}}, draft_s={1: {0: 0.0, 4: 1.2}})
    for _ in range(drafts_before):
        costs.observe(timing(4, 4.2, depth=4, draft_s=1.2, context=10))
    for batch in (1, 2, 4, 8):
        for context in (10, 100, 200, 500, 1000):
            costs.observe(timing(0, 1.0, batch=batch, context=context))
    assert 0.2 < costs.draft_s(4) < 1.21


def test_rounds_that_are_met_go_by_themselves() -> None:
    """Plain rounds get three times faster and the others do not; both are met again and again."""
    costs = table()
    for _ in range(40):
        costs.observe(timing(0, 0.4))
        for _ in range(2):
            costs.observe(timing(4, 1.4, depth=4, draft_s=0.4))
    assert costs.verify_s(0, 1, 0) == pytest.approx(0.4, rel=0.1)
    assert costs.verify_s(4, 1, 0) == pytest.approx(1.4, rel=0.1)
    assert costs.draft_s(4) == pytest.approx(0.4, rel=0.1)


def test_reading_missed_text_is_no_cost_of_the_draft() -> None:
    costs = table()
    for _ in range(10):
        meet(costs, timing(0, 1.0), timing(4, 1.4, depth=4, draft_s=40.0))
    assert costs.draft_s(4) == pytest.approx(0.4)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none(seconds: float) -> None:
    with pytest.raises(OptionError, match=r"verify_s\[1\]\[2\] must be a positive number of seconds"):
        table(verify_s={1: {0: 1.0, 2: seconds}})
    costs = table()
    costs.observe(timing(4, seconds, depth=4, draft_s=seconds))
    assert costs.as_dict() == table().as_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify_s": {}}, "verify_s is empty"),
        ({"verify_s": {1: {}}}, "verify_s is empty"),
        ({"verify_s": {0: {1: 1.0}}}, r"verify_s\[0\]\[1\]"),
        ({"draft_s": {1: {1: -0.1}}}, r"draft_s\[1\]\[1\] must be a number of seconds"),
        ({"context_s": math.nan}, "context_s must be"),
        ({"plain_context_s": -1.0}, "plain_context_s must be"),
    ],
)
def test_bad_tables(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        table(**settings)


def test_a_table_survives_json() -> None:
    costs = table(context_s=0.5, plain_context_s=0.25, base_context=3, graph_sizes=(2, 1), nodes=(0, 2))
    assert CostModel.from_dict(costs.as_dict()).as_dict() == costs.as_dict()


def test_a_table_that_does_not_learn_stays() -> None:
    costs = CostModel.linear(plain=1.0, node=0.1, draft=0.2)
    costs.observe(timing(3, 77.0, depth=3, draft_s=77.0))
    assert costs.round_s(3) == pytest.approx(1.9)


def test_nodes_follow_the_drafts_that_are_seen() -> None:
    """A drafter whose trees differ from request to request was measured with those of one."""
    costs = table(nodes=(0, 1, 2))
    for _ in range(30):
        costs.observe(timing(3, 1.3, depth=1, draft_s=0.1))
    assert costs.nodes == (0, 3, 3)
    assert costs.windows_s(1)[1] == pytest.approx(1.4, rel=0.05)
    for _ in range(30):
        costs.observe(timing(2, 1.2, depth=2, draft_s=0.2))
        costs.observe(timing(5, 1.5, depth=5, draft_s=0.5))
    assert costs.nodes == (0, 3, 3), "deeper drafts never have fewer, and beyond the measured ones lies a chain"


def test_windows_end_with_the_deepest_draft() -> None:
    assert [table().within(window) for window in (1, 8)] == [1, 8]
    assert [table(deepest=2).within(window) for window in (1, 2, 8)] == [1, 2, 2]
    assert CostModel.from_dict(table(deepest=2).as_dict()).deepest == 2


@given(
    st.dictionaries(st.integers(0, 70), st.floats(0.001, 1.0), min_size=1, max_size=6),
    st.lists(st.integers(0, 90), min_size=1, max_size=12),
    st.sampled_from((1, 2, 5)),
)
def test_a_walk_along_a_row_equals_single_looks(row: dict[int, float], sizes: list[int], batch: int) -> None:
    table = checked("verify_s", {1: row, 2: {size: 1.5 * seconds for size, seconds in row.items()}}, may_be_zero=False)
    assert row_of(table, batch, sorted(sizes)) == pytest.approx([interpolated(table, batch, size) for size in sorted(sizes)])


def test_a_round_says_more_about_others_that_draft_than_about_plain_ones() -> None:
    costs = table()
    before = [costs.verify_s(nodes) for nodes in (0, 8, 4)]
    costs.observe(timing(4, 1.2 * before[2], depth=4, draft_s=costs.draft_s(4)))
    plain, near, met = (costs.verify_s(nodes) / old for nodes, old in zip((0, 8, 4), before, strict=True))
    assert 1.0 < plain < near < met < 1.2
    assert near - 1.0 == pytest.approx((met - 1.0) * 11.0 / 12.0, rel=0.05)


def test_what_follows_a_round_is_paid_by_the_next_of_its_kind() -> None:
    costs, free = table(), table()
    for drafts, seconds in ((True, 0.6), (False, 0.2), (False, math.nan), (True, -1.0), (True, math.inf)):
        costs.note_tail(drafts, seconds)
    for one in (costs, free):
        for _ in range(200):
            one.observe(timing(0, 1.0))
            one.observe(timing(4, 1.4, depth=4, draft_s=0.4))
    assert costs.verify_s(0, 1, 0) == pytest.approx(1.2, rel=0.02)
    assert costs.verify_s(4, 1, 0) == pytest.approx(2.0, rel=0.02)
    assert free.verify_s(0, 1, 0) == pytest.approx(1.0, rel=0.02)


def test_reading_is_learnt_by_the_token() -> None:
    costs = table()
    costs.note_reading(10, 1.0)
    assert costs.read_s == pytest.approx(0.1)
    for num_tokens, seconds in ((0, 1.0), (10, 0.0), (10, math.nan), (10, math.inf), (10, -1.0)):
        costs.note_reading(num_tokens, seconds)
    assert costs.read_s == pytest.approx(0.1)
    for _ in range(30):
        costs.note_reading(10, 2.0)
    assert costs.read_s == pytest.approx(0.2, rel=0.01)
    assert costs.without_drafting().read_s == 0.0
    fixed = table(learns=False)
    fixed.note_reading(10, 1.0)
    assert fixed.read_s == 0.0


@pytest.mark.parametrize("num_drafts", [0, 30])
@pytest.mark.parametrize("plain_s", [0.7, 1.5])
def test_what_plain_rounds_take_moves_all_of_their_batch_alike(num_drafts: int, plain_s: float) -> None:
    """Drafts must look neither cheap nor dear because plain rounds were cold, or the machine has become slower or faster."""
    costs = table()
    meet(costs, *[timing(4, 1.4, depth=4, draft_s=0.4)] * num_drafts)
    before = [costs.verify_s(nodes, 1, 0) / costs.verify_s(0, 1, 0) for nodes in (4, 8)]
    drafting = costs.draft_s(4) / costs.verify_s(0, 1, 0)
    for _ in range(30):
        costs.observe(timing(0, plain_s))
        assert [costs.verify_s(nodes, 1, 0) / costs.verify_s(0, 1, 0) for nodes in (4, 8)] == pytest.approx(before)
    assert costs.verify_s(0, 1, 0) == pytest.approx(plain_s, rel=0.01)
    assert costs.draft_s(4) / costs.verify_s(0, 1, 0) == pytest.approx(drafting, rel=0.1)
