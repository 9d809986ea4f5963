"""Expectations by dynamic programming agree with the mean of the enumerated replay."""

import json
import math

import pytest

from lab.replay.survey import fixed_depth, oracle, survey
from monge.api import make_components
from monge.replay.costs import RoundCosts, predicted
from monge.replay.file import write_log
from monge.replay.run import replay_text
from monge.replay.simulate import seeded
from monge.testing.oracle import exact_law
from tests.replay.toys import logged, models, toy_parts

COSTS = RoundCosts.linear(plain=1.0, node=0.05, draft=0.2)


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        *(("chain(2)", rule) for rule in ("single_draft", "block", "target_walk")),
        ("chain(2, 'top')", "single_draft"),
        ("fixed_width((2,), 'iid')", "k_seq"),
        ("fixed_width((2,), 'greedy_plus_one')", "rrs"),
    ],
)
@pytest.mark.parametrize("text", [(0, 1, 1), (1, 0, 0)])
def test_fixed_depths_expect_what_replay_does(tree, verifier, text):
    log = logged(models(3)[0], text)
    parts = toy_parts(3, tree=tree, verifier=verifier)
    positions = survey(parts, log, log.texts[0], seeded("survey"), depth=2)
    for depth in (0, 1, 2):
        options = {"tree": tree, "verifier": verifier, "controller": f"fixed(max_depth={depth})"}

        def rounds(draws, options=options):
            return len(replay_text(toy_parts(3, **options), log, log.texts[0], draws))

        found = math.fsum(count * prob for count, prob in exact_law(rounds).items())
        assert fixed_depth(positions, COSTS, depth).rounds == pytest.approx(found, abs=0.2)


def test_where_a_lookup_drafts_a_level_costs_what_it_takes_to_verify_it():
    target, draft = models(3)
    log = logged(target, (2, 0, 1, 2, 0))

    def parts():
        pool = {"drafter": "pool('ngram', 'model')", "tree": "chain(2)"}
        return make_components(target, draft, controller="fixed(max_depth=2)", **pool)

    def seconds(draws):
        own = parts()
        return sum(
            predicted(one, COSTS, runs_network=own.runs_network(one.drafter)).times.total_s
            for one in replay_text(own, log, log.texts[0], draws)
        )

    positions = survey(parts(), log, log.texts[0], seeded("survey"), depth=2)
    assert {place.runs_network for place in positions} == {True, False}
    found = math.fsum(value * prob for value, prob in exact_law(seconds).items())
    assert fixed_depth(positions, COSTS, 2).seconds == pytest.approx(found, abs=0.2)


def test_the_oracle_is_at_least_as_fast_as_every_fixed_depth():
    log = logged(models(3)[0], (0, 1, 1, 2, 0, 2))
    positions = survey(toy_parts(3, tree="chain(3)"), log, log.texts[0], seeded("survey"), depth=3)
    depths = [fixed_depth(positions, COSTS, depth).seconds for depth in range(4)]
    assert depths[0] == pytest.approx(6.0)
    assert oracle(positions, COSTS, 3).seconds < min(depths)


def test_the_command_says_the_regret_and_draws(lab, tmp_path):
    log = logged(models(3)[0], (1, 0, 1, 0, 1, 0), prompt=(1, 0))
    path = write_log(log, tmp_path / "run.mlog")
    parts = "--drafter ngram --controller fixed --controller goodput"
    result = lab("replay", path, parts, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "best depth" in result.stdout
    for found in json.loads((tmp_path / "replay.json").read_text())["replayed"]:
        regret = found["bounds"]["regret"]
        assert regret["oracle"] >= regret["best_fixed"] - 1e-12
    pictures = {file.name for file in tmp_path.glob("*.png")}
    assert pictures == {"configurations.png", "survival.png", "depths.png"}
