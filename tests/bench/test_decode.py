"""The whole comparison on a tiny pair, and the contract of its document."""

import json

import pytest

from monge.bench.arms import QUICK_ASSISTANT_TOKENS, plain_arm, usual_arms, with_named
from monge.bench.decode import QUICK, ProgressCallbacks, compare, write_outcome
from monge.bench.runner import Settings
from monge.core.errors import OptionError
from monge.prompts import Prompt

PROMPTS = (
    Prompt(task="a", text="The sea was"),
    Prompt(task="a", text="Once"),
    Prompt(task="b", text="Question: why?"),
)


HEADLINE = ("speedup_over_plain", "speedup_over_assisted", "engine_efficiency", "block_efficiency")


def compared(pair, prompts, settings, ours, counts=QUICK_ASSISTANT_TOKENS):
    """The outcome; all steps are announced."""
    expected, steps = [], []

    def total(number):
        expected.append(number)
        steps.clear()

    progress = ProgressCallbacks(total=total, step=steps.append)
    found = compare(pair, prompts, settings, ours=ours, assistant_tokens=counts, progress=progress)
    if not any(arm["failure"] for arm in found.document["arms"]):
        assert expected == [len(steps)]
    return found


@pytest.fixture(scope="module")
def outcome(tiny_pair):
    settings = Settings(max_new_tokens=8, repeats=2, batch_sizes=(1, 2))
    return compared(tiny_pair, PROMPTS, settings, usual_arms())


def test_headline(outcome):
    document = outcome.document
    assert all(document[name] > 0 for name in HEADLINE)
    for part in ("greedy", "sampled"):
        assert all(document[part][name] > 0 for name in HEADLINE)
    assert document["block_efficiency"] >= 1
    assert document["engine_efficiency"] < 1
    assert document["batch_size"] == 1


def test_arms(outcome):
    arms = outcome.document["arms"]
    assert len(arms) == 7 * 2 * 2
    failed = {(arm["arm"], arm["batch_size"]) for arm in arms if arm["failure"] is not None}
    hosts = ("assisted", "assisted tuned", "prompt lookup")
    assert failed == {(f"transformers {name}", 2) for name in hosts}
    for arm in arms:
        if arm["failure"] is None:
            batches = 3 if arm["batch_size"] == 1 else 2
            assert arm["num_tokens"] == 2 * 8 * batches * arm["batch_size"]
            assert len(arm["seconds"]) == 2


def test_greedy_arms_decode_the_same_text(outcome):
    shares = {
        arm["same_as_plain_share"] for arm in outcome.document["arms"] if arm["failure"] is None
    }
    assert shares == {1.0, None}


def test_settings_models_and_provenance_stand_beside_the_numbers(outcome, tiny_paths):
    document = outcome.document
    assert document["models"] == {"target": tiny_paths[0], "draft": tiny_paths[1]}
    assert document["settings"]["max_new_tokens"] == 8
    assert [prompt["task"] for prompt in document["prompts"]] == ["a", "a", "b"]
    known = {"argv", "commit", "dirty", "versions", "device", "num_threads", "time_utc"}
    assert known <= set(document["provenance"])
    assert {entry["num_assistant_tokens"] for entry in document["assisted_tuning"]} == {2, 5}


def test_written(outcome, tmp_path):
    files = write_outcome(outcome, tmp_path / "new" / "folder")
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(outcome.document))
    assert files[1].stat().st_size > 100


def test_folder_that_cannot_be_written(outcome, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot write results"):
        write_outcome(outcome, tmp_path / "file")


FEW = Settings(max_new_tokens=4, repeats=2, batch_sizes=(1,), temperatures=(0.0,))


def test_named_arms_only(tiny_pair):
    ours = with_named([plain_arm()], ["mine: controller=goodput"])
    document = compared(tiny_pair, PROMPTS[:1], FEW, ours, counts=()).document
    assert [arm["arm"] for arm in document["arms"]] == ["monge none", "mine"]
    assert document["assisted_tuning"] == []  # nothing of the host is tuned
    assert document["speedup_over_plain"] is None
    assert document["slowest_adaptive"]["arm"] == "mine"
    ratio = document["arms"][1]["ratio_to_none_of_all"]
    assert 0 < ratio["low"] <= ratio["mean"] <= ratio["high"]


def test_empty_prompt_is_refused(tiny_pair):
    with pytest.raises(OptionError, match="a prompt has no tokens"):
        compared(tiny_pair, [Prompt(task="a", text="")], QUICK, usual_arms())
