"""The whole comparison on a tiny pair, and the contract of its document."""

import json

import pytest

from monge.bench.arms import NO_DRAFTS, QUICK_ASSISTANT_TOKENS, USUAL, arms_of
from monge.bench.decode import QUICK, compare
from monge.bench.runner import Settings
from monge.core.errors import OptionError
from monge.prompts import Prompt

TEXTS = ("a", "The sea was"), ("a", "Once"), ("b", "Question: why?")
PROMPTS = tuple(Prompt(task=task, text=text) for task, text in TEXTS)
HEADLINE = ("speedup_over_plain", "speedup_over_assisted", "engine_efficiency", "block_efficiency")


def compared(pair, prompts, settings, ours, counts=QUICK_ASSISTANT_TOKENS):
    """The document and the measurements; all calls are announced."""
    calls = []
    found = compare(
        pair,
        prompts,
        settings,
        ours=ours,
        assistant_tokens=counts,
        on_call=lambda *call: calls.append(call),
    )
    if not any(arm["failure"] for arm in found[0]["arms"]):
        place = next(place for place, call in enumerate(calls) if len(call) == 2)
        assert calls[place] == ("starting", len(calls) - place - 1)
    return found


@pytest.fixture(scope="module")
def outcome(tiny_pair):
    settings = Settings(max_new_tokens=8, repeats=2, batch_sizes=(1, 2))
    return compared(tiny_pair, PROMPTS, settings, arms_of(USUAL))


def test_headline(outcome):
    document, _ = outcome
    for part in (document, document["greedy"], document["sampled"]):
        assert all(part[name] > 0 for name in HEADLINE)
    assert document["block_efficiency"] >= 1 > document["engine_efficiency"]
    assert document["batch_size"] == 1


def test_arms(outcome):
    arms = outcome[0]["arms"]
    assert len(arms) == 7 * 2 * 2
    failed = {(arm["arm"], arm["batch_size"]) for arm in arms if arm["failure"] is not None}
    hosts = ("assisted", "assisted tuned", "prompt lookup")
    assert failed == {(f"transformers {name}", 2) for name in hosts}
    fine = [arm for arm in arms if arm["failure"] is None]
    for arm in fine:
        batches = 3 if arm["batch_size"] == 1 else 2
        assert arm["num_tokens"] == 2 * 8 * batches * arm["batch_size"]
        assert len(arm["seconds"]) == 2
    assert {arm["same_as_plain_share"] for arm in fine} == {1.0, None}, "greedy texts are equal"


def test_settings_models_and_provenance_stand_beside_the_numbers(outcome, tiny_paths):
    document, _ = outcome
    assert document["models"] == {"target": tiny_paths[0], "draft": tiny_paths[1]}
    assert document["settings"]["max_new_tokens"] == 8
    assert [prompt["task"] for prompt in document["prompts"]] == ["a", "a", "b"]
    known = {"argv", "commit", "dirty", "versions", "device", "num_threads", "time_utc"}
    assert known <= set(document["provenance"])
    assert {entry["num_assistant_tokens"] for entry in document["assisted_tuning"]} == {2, 5}
    json.dumps(document)


def test_named_arms_only(tiny_pair):
    few = Settings(max_new_tokens=4, repeats=2, batch_sizes=(1,), temperatures=(0.0,))
    ours = arms_of([NO_DRAFTS, "mine: controller=goodput"])
    document, _ = compared(tiny_pair, PROMPTS[:1], few, ours, counts=())
    assert [arm["arm"] for arm in document["arms"]] == ["monge none", "mine"]
    assert document["assisted_tuning"] == []  # nothing of the host is tuned
    assert document["speedup_over_plain"] is None
    assert document["slowest_adaptive"]["arm"] == "mine"
    ratio = document["arms"][1]["ratio_to_none_of_all"]
    assert 0 < ratio["low"] <= ratio["mean"] <= ratio["high"]


def test_empty_prompt_is_refused(tiny_pair):
    with pytest.raises(OptionError, match="a prompt has no tokens"):
        compared(tiny_pair, [Prompt(task="a", text="")], QUICK, arms_of(USUAL))
