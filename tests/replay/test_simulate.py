"""Simulated passes over a log, and what is compared of them."""

from dataclasses import replace

import pytest

from monge.api import make_components
from monge.core.metrics import block_efficiency
from monge.replay.compare import compare
from monge.replay.configuration import Configuration
from monge.replay.costs import RoundCosts
from monge.replay.simulate import plain_seconds, simulate
from tests.replay.toys import logged, models, toy_parts

TEXT = (0, 1, 1, 2, 0, 2)
COSTS = RoundCosts.linear(plain=1.0, node=0.05, draft=0.2)


def test_passes_have_predicted_times_and_are_reproducible():
    log = logged(models(3)[0], TEXT)
    parts = toy_parts(3, tree="chain(2)")
    passes = simulate(parts, log, COSTS, repeats=40)
    assert passes == simulate(parts, log, COSTS, repeats=40)
    for record in passes[0].records:
        assert record.times.total_s == pytest.approx(
            1.0 + 0.05 * record.num_nodes + 0.2 * record.depth
        )
    assert [one.text for one in passes] == [0] * 40
    committed = [token for record in passes[3].records for token in record.token_ids]
    assert tuple(committed) == TEXT
    assert plain_seconds(log.texts[0], COSTS) == pytest.approx(len(TEXT))


def test_a_controller_sees_costs_and_predicted_rounds_only():
    log = logged(models(3)[0], TEXT)
    parts = toy_parts(3, tree="chain(3)", controller="on_the_fly")
    free = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)
    dear = RoundCosts.linear(plain=1.0, node=0.0, draft=50.0)
    eager = [record.depth for one in simulate(parts, log, free) for record in one.records]
    idle = [record.depth for one in simulate(parts, log, dear) for record in one.records]
    assert max(eager) == 3
    assert max(idle) == 0


POOL = "pool('ngram', 'model')"


@pytest.mark.parametrize("controller", ["hedge", "linear_selection"])
def test_in_a_pool_only_the_draft_model_takes_time_to_draft(controller):
    target, draft = models(3)
    log = logged(target, TEXT * 4)
    pool = {"drafter": POOL, "tree": "chain(2)", "verifier": "single_draft"}
    parts = make_components(target, draft, controller=controller, **pool)
    records = [record for one in simulate(parts, log, COSTS, repeats=8) for record in one.records]
    assert {record.drafter for record in records if record.depth} == {"ngram", "model"}
    for record in records:
        drafting = 0.2 * record.depth if record.drafter == "model" else 0.0
        assert record.times.total_s == pytest.approx(1.0 + 0.05 * record.num_nodes + drafting)


def test_a_pool_is_replayed_by_name():
    target, draft = models(3)
    log = replace(
        logged(target, TEXT * 4),
        costs={name: COSTS.as_dict() for name in ("ngram", "model", "none")},
    )
    document = compare(
        [
            Configuration(drafter=POOL, tree="chain(2)", controller="hedge"),
            Configuration(drafter="pool('suffix', 'model')", tree="chain(2)", controller="hedge"),
        ],
        log,
        draft,
        repeats=2,
    )
    timed, other = document["replayed"]
    assert document["refused"] == []
    assert (timed["tokens_per_s"]["mean"] > 0.0, timed["untimed"]) == (True, None)
    assert other["tokens_per_s"] is None
    assert other["block_efficiency"]["mean"] >= 1.0
    assert "no measured times of drafter 'suffix' (it has: model, ngram, none)" in other["untimed"]
    assert "`monge replay record` with --drafter suffix measures them" in other["untimed"]


def test_block_efficiency_of_an_accepting_pair():
    """A draft that equals the target is always accepted."""
    target, _ = models(3)
    log = logged(target, TEXT)
    parts = make_components(target, models(3)[0], tree="chain(2)")
    (passes,) = simulate(parts, log)
    assert block_efficiency(passes.records) == len(TEXT) / 2


def test_what_is_printed_plans_as_what_was_replayed() -> None:
    """A log is replayed with one plan for all rounds, which is not what the library does by default."""
    chosen = Configuration(drafter="model", tree="chain(2)")
    drafted = {"drafter": "model", "tree": "chain(2)", "controller": "fixed"}
    assert chosen.load_arguments == drafted
    adaptive = Configuration(drafter="model", controller="goodput")
    assert adaptive.load_arguments == {"drafter": "model", "controller": "goodput"}
    assert Configuration(drafter="none").load_arguments == {"drafter": "none"}
