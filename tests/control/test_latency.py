"""The latency model: interpolation, corrections by measured rounds, and what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.control.latency import Latency, shortest_s
from monge.core.errors import OptionError
from monge.core.verdict import RoundTiming

TABLE = {1: {0: 1.0, 2: 1.2, 4: 1.6}, 4: {0: 2.0, 2: 2.4, 4: 3.2}}
DRAFT = {1: {0: 0.0, 2: 0.4}, 4: {0: 0.0, 2: 0.8}}


def round_of(
    num_nodes: int, depth: int, rest_s: float, draft_s: float = 0.0, **fields: object
) -> RoundTiming:
    settings = {"batch_size": 1, "context_length": 0, **fields}
    return RoundTiming(num_nodes=num_nodes, depth=depth, rest_s=rest_s, draft_s=draft_s, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_nodes", "batch_size", "seconds"),
    [(0, 1, 1.0), (1, 1, 1.1), (3, 1, 1.4), (6, 1, 2.0), (0, 4, 2.0), (2, 2, 1.6), (2, 7, 3.6)],
)
def test_times_between_and_beyond_the_measured_ones_lie_on_lines(
    num_nodes: int, batch_size: int, seconds: float
) -> None:
    assert Latency(verify_s=TABLE, draft_s=DRAFT).verify_s(num_nodes, batch_size) == pytest.approx(
        seconds
    )


def test_a_round_is_its_drafting_and_its_verification() -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT, nodes=(0, 2, 4))
    assert latency.round_s(0) == 1.0
    assert latency.round_s(2) == pytest.approx(1.6 + 0.4)
    assert latency.rounds_s(2, 4) == pytest.approx([2.0, 2.4 + 0.4, 3.2 + 0.8])
    assert latency.without_drafting().rounds_s(2) == pytest.approx([1.0, 1.1, 1.2])


def test_context_costs_by_request_and_token() -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT, context_s=0.01, base_context=10)
    assert latency.verify_s(0, 4, 60) == pytest.approx(2.0 + 4 * 50 * 0.01)
    assert latency.verify_s(0, 1, 10) == latency.verify_s(0, 1)


def test_graphs_of_fixed_sizes_are_paid_for_whole() -> None:
    latency = Latency(
        verify_s={1: {0: 1.0, 3: 1.5, 7: 2.0}}, draft_s={1: {0: 0.0}}, graph_sizes=(1, 4, 8)
    )
    assert [latency.verify_s(count) for count in (0, 1, 3, 4, 7)] == [1.0, 1.5, 1.5, 2.0, 2.0]


def test_measured_rounds_correct_the_table() -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for _ in range(40):
        latency.observe(round_of(2, 2, rest_s=2.4, draft_s=0.8))
    assert latency.verify_s(2) == pytest.approx(2.4, rel=0.02)
    assert latency.draft_s(2) == pytest.approx(0.8, rel=0.02)
    assert latency.verify_s(2, 4) > 2.4, "a slower machine is slower for other batches too"


def test_a_table_that_does_not_learn_stays() -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT, learns=False)
    latency.observe(round_of(0, 0, rest_s=9.0))
    assert latency.as_dict() == Latency(verify_s=TABLE, draft_s=DRAFT).as_dict()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("batch_size", [1, 3, 9])
def test_times_that_are_no_times_are_ignored(batch_size: int, seconds: float) -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for _ in range(2):
        latency.observe(round_of(2, 2, seconds, seconds, batch_size=batch_size))
    assert latency.as_dict() == Latency(verify_s=TABLE, draft_s=DRAFT).as_dict()


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_times_beyond_a_table_that_falls_do_not_fall(batch_size: int) -> None:
    """Measured at a busy moment, a batch of 1 may look slower than one of 2, and a short draft than a long one."""
    latency = Latency(verify_s={1: {0: 9.0}, 2: {0: 1.0}}, draft_s={1: {1: 2.0, 2: 0.5}})
    assert latency.verify_s(0, batch_size) == (9.0 if batch_size == 1 else 1.0)
    assert latency.draft_s(8, batch_size) == 0.5
    latency.observe(round_of(8, 8, 1.5, 0.7, batch_size=batch_size))
    assert min(latency.rounds_s(12, batch_size)) > 0.0


@pytest.mark.parametrize(
    ("times", "shortest"),
    [((0.2, 0.1), 0.1), ((0.0, -1.0, math.nan, 0.3), 0.3), ((math.inf,), 1e-9), ((), 1e-9)],
)
def test_a_table_takes_the_shortest_time(times: tuple[float, ...], shortest: float) -> None:
    assert shortest_s(times) == shortest


def test_reading_missed_text_is_no_cost_of_a_draft() -> None:
    """The first draft after plain rounds is longer; later ones are the usual ones."""
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for _ in range(10):
        latency.observe(round_of(0, 0, rest_s=1.0))
        latency.observe(round_of(2, 2, rest_s=1.8, draft_s=5.4))
    assert latency.draft_s(2) == pytest.approx(0.4)
    assert latency.verify_s(2) == pytest.approx(1.2), "nor of their verification"
    assert latency.catch_up_s == pytest.approx(5.0)
    assert latency.of("model").catch_up_s == pytest.approx(5.0), "views share it"


def test_a_lookup_has_no_text_to_read_first() -> None:
    """Its rounds after plain ones are as long as all others, and count."""
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for _ in range(30):
        latency.observe(round_of(0, 0, rest_s=1.0))
        latency.observe(round_of(2, 2, rest_s=1.8, catches_up=False))
    assert latency.verify_s(2) == pytest.approx(1.8, rel=0.05)
    assert latency.catch_up_s == 0.0


def test_networks_of_a_pool_have_tables_of_their_own() -> None:
    latency = Latency(
        verify_s=TABLE,
        draft_s=DRAFT,
        drafters={"a": (DRAFT, ()), "b": ({1: {0: 0.0, 2: 4.0}}, (0, 3, 6))},
    )
    for _ in range(30):
        latency.observe(round_of(6, 2, rest_s=2.0, draft_s=8.0, drafter="b"))
    assert latency.of("b").draft_s(2) == pytest.approx(8.0, rel=0.05)
    assert latency.of("a").draft_s(2) == pytest.approx(0.4)
    assert latency.of("b").num_nodes(2) == 6
    assert latency.of("a").num_nodes(2) == 2


def test_nodes_follow_the_trees_that_are_drafted() -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT, nodes=(0, 3, 6))
    for _ in range(10):
        latency.observe(round_of(2, 1, rest_s=1.2, draft_s=0.2))
    assert latency.num_nodes(1) == 2
    assert latency.num_nodes(2) == 6
    assert latency.num_nodes(4) == 8, "a chain continues"


def test_nodes_of_depths_that_were_not_measured_are_learnt() -> None:
    """A lookup whose matches branch: four candidates of the root, measured as a chain."""
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for _ in range(10):
        latency.observe(round_of(4, 1, rest_s=1.6, catches_up=False))
    assert [latency.num_nodes(depth) for depth in range(4)] == [0, 4, 5, 6]


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.01, 10.0)), max_size=30))
def test_more_nodes_never_cost_less(rounds: list[tuple[int, float]]) -> None:
    latency = Latency(verify_s=TABLE, draft_s=DRAFT)
    for num_nodes, seconds in rounds:
        latency.observe(round_of(num_nodes, 0, rest_s=seconds))
    times = [latency.verify_s(count) for count in range(8)]
    assert times == sorted(times)


def test_it_survives_json() -> None:
    latency = Latency(
        verify_s=TABLE,
        draft_s=DRAFT,
        context_s=0.1,
        base_context=3,
        graph_sizes=(1, 8),
        nodes=(0, 2),
        deepest=4,
        drafters={"a": (DRAFT, (0, 1))},
    )
    again = Latency.from_dict(latency.as_dict())
    assert again.as_dict() == latency.as_dict()
    assert (again.within(8), again.of("a").num_nodes(1)) == (4, 1)


@pytest.mark.parametrize(
    ("given_table", "message"),
    [
        ({"verify_s": {}}, "verify_s is empty"),
        ({"verify_s": {1: {}}}, "verify_s is empty"),
        ({"verify_s": {1: {0: 0.0}}}, r"verify_s\[1\]\[0\] must be a positive number"),
        ({"draft_s": {1: {1: math.nan}}}, r"draft_s\[1\]\[1\] must be a number"),
        ({"draft_s": {0: {1: 1.0}}}, r"draft_s\[0\]\[1\]"),
        ({"context_s": -1.0}, "context_s must be"),
    ],
)
def test_impossible_tables_are_refused(given_table: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"verify_s": TABLE, "draft_s": DRAFT, **given_table}
    with pytest.raises(OptionError, match=message):
        Latency(**settings)  # type: ignore[arg-type]
