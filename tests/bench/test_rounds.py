"""`monge bench rounds`: every plain round has the place that it had behind a draft, and a ratio to those without drafts."""

import itertools
import json

import pytest

from monge.bench import rounds as bench_rounds
from monge.bench.rounds import RoundSettings, Turns, measure
from monge.bench.tasks import Prompt
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.engine.clock import measured_by
from tests.bench.tiny import save_pair
from tests.control.scripts import chain_round, draws


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def two_prompts(monkeypatch):
    monkeypatch.setattr(bench_rounds, "shipped", lambda **_: [Prompt(task="t", text=text) for text in ("One.", "Two.")])


def test_turns_draft_and_do_not_in_turn():
    turns = Turns(2, 3, 4)
    depths = [turns.plan(state, draws()).max_depth for state in range(10)]
    assert depths == [4, 4, 0, 0, 0] * 2
    assert [Turns(0, 1, 0).plan(state, draws()).max_depth for state in range(3)] == [0, 0, 0]


def test_places_are_counted_from_the_last_draft_and_first_rounds_left_out():
    depths = [0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0]
    records = [chain_round(depth, 0, plan=DraftPlan(max_depth=depth)) for depth in depths]
    found = bench_rounds._places(records, 1)
    assert [place for place, _ in found] == [0, 1, 2, 1, 2, 3]
    assert bench_rounds._places(records, 2) == [], "others had left"


@pytest.mark.parametrize("batch", [1, 2])
def test_measures_both_ways(pair, batch):
    ticks = itertools.count(0.0)
    loading = {"target": pair[0], "draft": pair[1], "drafter": "model"}
    settings = RoundSettings(drafted=2, plain=3, depth=2, batch=batch, max_new_tokens=24, repeats=2, loading=loading)
    with measured_by(lambda: next(ticks)):
        document = measure(settings)
    assert [one["place"] for one in document["places"]] == [1, 2, 3]
    assert len(document["plain"]["values"]) == 2
    for one in document["places"]:
        assert one["ratio"]["median"] == pytest.approx(1.0, abs=0.3), "a clock of ticks: all plain rounds are alike"
    json.dumps(document)


def test_the_command(run, pair):
    result = run(
        *("bench", "rounds", "--target", pair[0], "--draft", pair[1], "--drafter", "model"),
        *("--drafted", 2, "--plain", 2, "--depth", 1, "--max-new-tokens", 20, "--repeats", 1, "--json"),
    )
    assert result.exit_code == 0, result.output
    assert "plain rounds, batch 1" in result.stdout
    assert "none before" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["settings"]["loading"]["drafter"] == "model"
    assert len(document["places"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plain": 0}, "plain must be at least 1; got 0"),
        ({"batch": 0}, "batch must be at least 1; got 0"),
        ({"max_new_tokens": 20}, "12 rounds that draft and 8 plain ones may write 59 tokens; .* got max_new_tokens=20"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(OptionError, match=message):
        RoundSettings(**settings)


def test_the_command_refuses_them(run):
    result = run("bench", "rounds", "--repeats", 0)
    assert result.exit_code != 0
    assert "bench rounds: repeats must be at least 1; got 0" in result.output.replace("\n", " ")


def test_a_drafter_that_drafts_nothing_is_refused(pair):
    with pytest.raises(OptionError, match="this drafter drafts nothing, so no round is behind a draft"):
        measure(RoundSettings(loading={"target": pair[0], "drafter": "none"}))
