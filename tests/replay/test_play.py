"""Expectations by dynamic programming, and replays by drawing, agree with the real loop's exact law."""

import math
from dataclasses import replace
from itertools import product

import pytest

from monge.api import make_components
from monge.core.metrics import block_efficiency
from monge.replay.compare import Settings, compare
from monge.replay.configuration import Configuration
from monge.replay.costs import RoundCosts, predicted
from monge.replay.play import hindsight, look, nodes_by_depth, play
from monge.replay.run import replay_text
from monge.replay.survey import fixed_window
from monge.testing.oracle import exact_law
from tests.replay.toys import PROMPT, logged, models, toy_parts

TEXT = (0, 1, 1, 2, 0, 2)
COSTS = RoundCosts.linear(plain=1.0, node=0.05, draft=0.2)


def expected_rounds(options, log):
    law = exact_law(
        lambda draws: len(replay_text(toy_parts(3, **options), log, log.texts[0], draws))
    )
    return math.fsum(count * prob for count, prob in law.items())


@pytest.mark.parametrize("verifier", ["single_draft", "block", "target_walk", "k_seq", "optimal"])
def test_fixed_windows_expect_what_replay_does(verifier):
    """The survey's chances are exact: their dynamic program gives the mean of the enumerated replay."""
    log = logged(models(3)[0], TEXT[:4])
    positions = look(toy_parts(3, tree="chain(2)", verifier=verifier), log, depth=2)
    for window in (0, 1, 2):
        options = {
            "tree": "chain(2)",
            "verifier": "single_draft" if verifier == "optimal" else verifier,
        }
        found = expected_rounds(options | {"controller": f"fixed(max_depth={window})"}, log)
        assert fixed_window(positions[0], COSTS, window).rounds == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("verifier", ["single_draft", "block"])
def test_texts_that_the_draft_model_cannot_write_are_surveyed(verifier):
    target, draft = models(3, "sparse")
    text = next(
        text
        for text in product(range(3), repeat=3)
        if all(target.table((*PROMPT, *text[:place]))[text[place]] > 0 for place in range(3))
        and draft.table(PROMPT)[text[0]] == 0
    )
    log = logged(target, text)
    options = {"tree": "chain(2)", "verifier": verifier}
    positions = look(toy_parts(3, "sparse", **options), log, depth=2)
    law = exact_law(
        lambda draws: len(replay_text(toy_parts(3, "sparse", **options), log, log.texts[0], draws))
    )
    found = math.fsum(count * prob for count, prob in law.items())
    assert fixed_window(positions[0], COSTS, 2).rounds == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        *(("fixed_width((2,), 'iid')", rule) for rule in ("rrs", "k_seq")),
        *(("fixed_width((2,), 'greedy_plus_one')", rule) for rule in ("greedy", "rrs")),
    ],
)
def test_chances_of_several_candidates(tree, verifier):
    # One of these is the draft's most probable token, which some trees always draw.
    log = logged(models(3)[0], (1, 0, 0))
    positions = look(toy_parts(3, tree=tree, verifier=verifier), log, depth=1)
    found = expected_rounds({"tree": tree, "verifier": verifier}, log)
    assert fixed_window(positions[0], COSTS, 1).rounds == pytest.approx(found, abs=1e-12)


def test_the_oracle_is_at_least_as_fast_as_every_window():
    log = logged(models(3)[0], TEXT)
    seen = hindsight(look(toy_parts(3, tree="chain(3)"), log, depth=3), COSTS, 3)
    fastest = min(texts[0].seconds for texts in seen.windows)
    assert seen.windows[seen.best_window][0].seconds == fastest
    assert seen.oracle[0].seconds < fastest
    assert seen.windows[0][0].rounds == len(TEXT)
    assert seen.windows[0][0].seconds == pytest.approx(len(TEXT))


def test_passes_have_predicted_times_and_are_reproducible():
    log = logged(models(3)[0], TEXT)
    parts = toy_parts(3, tree="chain(2)")
    played = play(parts, log, COSTS, repeats=40)
    assert [one.records for one in played] == [
        one.records for one in play(parts, log, COSTS, repeats=40)
    ]
    for record in played[0].records:
        assert record.times.total_s == pytest.approx(
            1.0 + 0.05 * record.num_nodes + 0.2 * record.depth
        )
    assert {one.repeat for one in played} == set(range(40))
    committed = [token for record in played[3].records for token in record.token_ids]
    assert tuple(committed) == TEXT
    rounds = sum(len(one.records) for one in played) / 40
    positions = look(parts, log, depth=2)
    assert rounds == pytest.approx(fixed_window(positions[0], COSTS, 2).rounds, abs=0.4)
    assert nodes_by_depth(positions) == (0, 1, 2)


def test_a_controller_sees_costs_and_predicted_rounds_only():
    log = logged(models(3)[0], TEXT)
    parts = toy_parts(3, tree="chain(3)", controller="on_the_fly")
    free = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)
    dear = RoundCosts.linear(plain=1.0, node=0.0, draft=50.0)
    eager = [record.depth for one in play(parts, log, free) for record in one.records]
    idle = [record.depth for one in play(parts, log, dear) for record in one.records]
    assert max(eager) == 3
    assert max(idle) == 0


POOL = "pool('ngram', 'model')"


@pytest.mark.parametrize("controller", ["hedge", "linear_selection"])
def test_in_a_pool_only_the_draft_model_takes_time_to_draft(controller):
    target, draft = models(3)
    log = logged(target, TEXT * 4)
    parts = make_components(
        target,
        draft,
        drafter=POOL,
        tree="chain(2)",
        verifier="single_draft",
        controller=controller,
    )
    records = [record for one in play(parts, log, COSTS, repeats=8) for record in one.records]
    assert {record.drafter for record in records if record.depth} == {"ngram", "model"}
    for record in records:
        drafting = 0.2 * record.depth if record.drafter == "model" else 0.0
        assert record.times.total_s == pytest.approx(1.0 + 0.05 * record.num_nodes + drafting)


def test_windows_of_a_pool_expect_its_seconds_too():
    """Where a lookup drafts, a level costs what it takes to verify it."""
    target, draft = models(3)
    log = logged(target, (2, 0, 1, 2, 0))

    def seconds_of(window, draws):
        parts = make_components(
            target,
            draft,
            drafter=POOL,
            tree="chain(2)",
            controller=f"fixed(max_depth={window})",
        )
        records = replay_text(parts, log, log.texts[0], draws)
        return sum(
            predicted(one, COSTS, runs_network=parts.runs_network(one.drafter)).times.total_s
            for one in records
        )

    positions = look(make_components(target, draft, drafter=POOL, tree="chain(2)"), log, depth=2)
    assert {place.runs_network for place in positions[0]} == {True, False}
    for window in (0, 1, 2):
        law = exact_law(lambda draws, window=window: seconds_of(window, draws))
        found = math.fsum(seconds * prob for seconds, prob in law.items())
        assert fixed_window(positions[0], COSTS, window).seconds == pytest.approx(found, abs=1e-12)


def test_a_survey_is_shared_by_those_whose_tree_is_the_same():
    target, draft = models(3)
    log = replace(logged(target, TEXT * 4), costs={"model": COSTS.as_dict()})
    both = [Configuration(drafter="model", controller=name) for name in ("fixed", "goodput")]
    settings = Settings(repeats=1)
    fixed, price = compare(both, log, draft, settings)["replayed"]
    assert compare(both[1:], log, draft, settings)["replayed"] == [price]
    assert len(fixed["hindsight"]["windows"]) == 4, "a chain of three"
    assert len(price["hindsight"]["windows"]) == 9, "which `price` may make longer"


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
        Settings(repeats=2),
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
    (played,) = play(parts, log)
    assert block_efficiency(played.records) == len(TEXT) / 2


def test_what_is_printed_plans_as_what_was_replayed() -> None:
    """A log is replayed with one plan for all rounds, which is not what the library does by default."""
    chosen = Configuration(drafter="model", tree="chain(2)")
    drafted = {"drafter": "model", "tree": "chain(2)", "controller": "fixed"}
    assert chosen.load_arguments == drafted
    adaptive = Configuration(drafter="model", controller="goodput")
    assert adaptive.load_arguments == {"drafter": "model", "controller": "goodput"}
    assert Configuration(drafter="none").load_arguments == {"drafter": "none"}
