"""What rounds cost where drafters take turns: each has its own drafting, and text to read after a rest."""

import json
from dataclasses import replace

import pytest

from monge.api import make_parts
from monge.control.arms import Arms
from monge.control.base import Memory
from monge.control.cost_model import CostModel
from monge.core.selection import Member
from monge.core.verdict import RoundTiming
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.cost_scripts import meet, table, timing


def pooled() -> CostModel:
    """A table of two networks, one of them four times as dear."""
    return table(drafters={"small": ({1: {0: 0.0, 4: 0.4}}, (0, 1)), "large": ({1: {0: 0.0, 4: 1.6}}, (0, 2, 4))})


def test_drafters_of_a_pool_have_their_own_costs() -> None:
    costs = pooled()
    assert [costs.of(name).round_s(2) for name in ("small", "large", "other")] == pytest.approx([1.4, 2.2, 1.4])
    assert costs.of("large").nodes[2] == 4
    for _ in range(30):
        costs.observe(replace(timing(4, 1.4, depth=4, draft_s=0.8), drafter="large"))
    assert costs.of("large").draft_s(4) == pytest.approx(0.8, rel=0.05)
    assert costs.of("small").draft_s(4) == pytest.approx(0.4)
    assert costs.draft_s(4) == pytest.approx(0.4)
    again = CostModel.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again.as_dict() == costs.as_dict()


def test_a_pools_only_network_has_one_table() -> None:
    """What corrects it by name is what windows are planned with; and a plain round that makes all dearer does so once."""
    own = {1: {0: 0.0, 4: 0.4}}
    costs, lone = (
        CostModel(verify_s={1: {0: 1.0, 8: 1.8}}, draft_s=own, drafters=drafters, learns=True)
        for drafters in ({"model": (own, (0, 1, 2, 3, 4))}, {})
    )
    for number in range(60):
        depth = 0 if number % 3 == 0 else 4
        seen = timing(depth, 3.0, depth=depth, draft_s=0.8 * (depth > 0))
        costs.observe(replace(seen, drafter="model" if depth else None))
        lone.observe(seen)
    assert costs.levels_s(4)[0][4] > 0.6
    assert costs.levels_s(4) == lone.levels_s(4)
    assert costs.of("model").draft_s(4) == costs.draft_s(4)
    again = CostModel.from_dict(costs.as_dict())
    again.observe(replace(timing(4, 3.0, depth=4, draft_s=5.0), drafter="model"))
    assert again.levels_s(4)[0][4] == again.of("model").draft_s(4) != costs.draft_s(4)


def test_a_round_as_one_leaves_its_drafter_nothing_to_read() -> None:
    own = {1: {0: 0.0, 4: 0.4}}
    costs = CostModel(verify_s={1: {0: 1.0, 8: 1.8}}, draft_s=own, drafters={"model": (own, (0, 1, 2, 3, 4))}, learns=True)
    costs.note_whole(3, 1.2)
    costs.observe_whole(replace(timing(3, 1.2, depth=3), drafter="model"))
    costs.observe(replace(timing(4, 1.4, depth=4, draft_s=0.8), drafter="model"))
    assert costs.draft_s(4) > 0.4
    assert costs.catch_up_s == 0.0


def test_a_drafter_that_rested_reads_what_it_missed_first() -> None:
    """That time is no cost of its draft, whether the rounds between were plain or another's."""
    costs = pooled()
    meet(costs, replace(timing(4, 1.4, depth=4, draft_s=0.4), drafter="small"))
    for draft_s in (9.0, 1.6):
        meet(costs, replace(timing(4, 1.4, depth=4, draft_s=draft_s), drafter="large"))
    assert costs.of("large").draft_s(4) == pytest.approx(1.6)
    assert costs.catch_up_s == pytest.approx(9.0 - 1.6)
    meet(costs, timing(0, 1.0), replace(timing(4, 1.4, depth=4, draft_s=9.0), drafter="large"))
    assert costs.of("large").draft_s(4) == pytest.approx(1.6)


@pytest.mark.parametrize("rest", [timing(0, 1.0), replace(timing(4, 1.4), drafter="ngram")])
def test_the_first_draft_after_a_rest_is_no_news_about_going_on_unless_it_is_good_news(rest: RoundTiming) -> None:
    """A rest has no network's drafts; lookups may go on."""
    costs = CostModel(verify_s={1: {0: 1.0, 4: 1.4}}, draft_s={1: {0: 0.0, 4: 0.4}})
    meet(costs, *[rest] * 4, timing(4, 2.4, depth=4, draft_s=0.9))
    assert costs.round_s(4) == pytest.approx(1.8)
    assert costs.catch_up_s == pytest.approx(1.0 + 0.5)
    meet(costs, timing(4, 2.4, depth=4, draft_s=0.4))  # the second goes on
    assert costs.round_s(4) > 1.85
    high = costs.round_s(4)
    meet(costs, *[rest] * 4, timing(4, 1.0, depth=4, draft_s=0.4))
    assert costs.round_s(4) < high


def test_drafts_without_a_network_are_learnt_from_however_rare_they_are() -> None:
    costs = CostModel(verify_s={1: {0: 1.0, 4: 1.4}}, draft_s={1: {0: 0.0}})
    for _ in range(30):
        meet(costs, *[timing(0, 1.0)] * 4, timing(4, 2.4))
    assert costs.verify_s(4, 1, 1) > 1.5


def test_selectors_count_each_drafters_own_time() -> None:
    memory = Memory(pooled(), members=tuple(Member(name=name, max_depth=4, runs_network=True) for name in ("small", "large")))
    arms = Arms.of(memory, "hedge")
    assert [arms.seconds(arm, 4, 4, 0) for arm in (0, 1)] == pytest.approx([1.8, 3.0])
    assert [arms.memories[arm].costs.draft_s(4) for arm in (0, 1)] == pytest.approx([0.4, 1.6])  # type: ignore[union-attr]


def test_networks_of_a_pool_are_timed_by_name() -> None:
    models = TabularModel(RandomTable(3, 1), 3), TabularModel(RandomTable(3, 2), 3)
    parts = make_parts(*models, drafter="pool('ngram', 'model')", tree="chain(3)", controller="hedge")
    assert parts.memory.costs is not None
    assert set(parts.memory.costs.as_dict()["drafters"]) == {"model"}
    assert parts.memory.costs.of("model").draft_s(3) > 0.0
