"""The drop-in plans by the default controller of `monge.load`, where none is named."""

import copy

import pytest
import torch
from transformers import set_seed

import monge
from monge.plugins import transformers_generate
from tests.engine.tiny import network, padded, perturbed, prompts

ROWS = padded(prompts((9, 4), seed=3))
SETTINGS = {"max_new_tokens": 8, "eos_token_id": None}


@pytest.fixture
def decoded(monkeypatch):
    """Components and requests of the calls, as they are decoded."""
    seen, decode = [], transformers_generate.decode

    def noting(sessions, components, **options):
        seen.append((components, [session.request for session in sessions]))
        return decode(sessions, components, **options)

    monkeypatch.setattr(transformers_generate, "decode", noting)
    return seen


@pytest.mark.parametrize("has_draft", [True, False])
def test_the_drop_in_takes_that_of_load(decoded, has_draft):
    target = network("llama")
    draft = perturbed(target) if has_draft else None
    target.generate(
        **ROWS, **SETTINGS, do_sample=False, custom_generate=monge.speculate, draft_model=draft
    )
    ((found, requests),) = decoded
    expected = monge.load(target, draft).components
    assert found.controllers == expected.controllers
    assert (found.controller, found.seeded) == (expected.controller, expected.seeded)
    assert found.shared.members == expected.shared.members
    assert type(found.rule) is type(expected.rule)
    assert [request.controller for request in requests] == [None, None]


def test_sampled_calls_keep_a_plan_that_a_seed_repeats(decoded):
    target = network("llama")
    texts, draft = [], perturbed(target)
    for _ in range(2):
        set_seed(5)
        ours = {"custom_generate": monge.speculate, "draft_model": draft}
        texts.append(target.generate(**ROWS, **SETTINGS, **ours, do_sample=True))
    assert torch.equal(*texts)
    assert {request.controller for _, requests in decoded for request in requests} == {"fixed"}


def test_what_is_learned_of_a_model_is_kept_for_its_next_calls(decoded):
    made = monge.accelerate(copy.deepcopy(network("llama")), perturbed(network("llama")))
    for options in ({}, {}, {"tree": "chain(2)"}):
        made.generate(**ROWS, **SETTINGS, do_sample=False, **options)
    shared = [components.shared for components, _ in decoded]
    assert shared[0] is shared[1]
    assert shared[2] is not shared[0], "another tree has other times"
