"""A real model end to end: the same text as `transformers`, the same law as the target, and a chat over HTTP."""

from collections import Counter

import pytest
import torch
from fastapi.testclient import TestClient
from scipy.stats import chi2

import monge
from monge.core.sampling_rules import SamplingRules
from monge.options import ServeOptions
from monge.serve.http.app import create_app

from .conftest import CONVERSATION

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def greedy_ids(network, plain):
    prompt = torch.tensor([plain.encode_chat(CONVERSATION)])
    output = network.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False
    )
    return tuple(output[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": "none"},
        {"drafter": "ngram(min_ngram=1)"},
        {"drafter": "suffix"},
    ],
    ids=lambda parts: parts["drafter"],
)
def test_greedy_text_is_that_of_transformers(network, tokenizer, greedy_ids, parts):
    decoder = monge.load(network, tokenizer=tokenizer, controller="fixed", **parts)
    result = decoder.chat(CONVERSATION, max_new_tokens=NUM_TOKENS)
    assert result.token_ids == greedy_ids


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_shipped_head_drafts_well(network, tokenizer, greedy_ids, temperature):
    decoder = monge.load(
        network, "smollm2-head", tokenizer=tokenizer, tree="chain(3)", controller="fixed"
    )
    options = {"max_new_tokens": 4 * NUM_TOKENS, "temperature": temperature, "seed": 0}
    result = decoder.chat(CONVERSATION, **options)
    assert temperature > 0 or result.token_ids[:NUM_TOKENS] == greedy_ids
    assert result.stats.block_efficiency > 1.15


def test_sampled_text_has_the_law_of_the_target(network, tokenizer, plain):
    """Two tokens of the two most probable each, drafted badly: always the most probable token."""
    prompt, num_samples, options = plain.encode("The sky is"), 128, {"top_k": 2, "temperature": 1.5}
    decoder = monge.load(
        network,
        network,
        tokenizer=tokenizer,
        tree="chain(2)",
        drafter="model(top_k=1)",
        controller="fixed",
        max_batch_size=16,
    )
    results = decoder.generate(
        [prompt] * num_samples, max_new_tokens=2, seed=0, ignore_eos=True, **options
    )
    counts = Counter(result.token_ids for result in results)
    law = _law_of_two(network, prompt, SamplingRules(**options))
    assert set(counts) <= set(law)
    expected = {tokens: num_samples * probability for tokens, probability in law.items()}
    statistic = sum((counts[tokens] - count) ** 2 / count for tokens, count in expected.items())
    assert chi2.sf(statistic, len(law) - 1) > 1e-4, (counts, expected)
    assert any(
        record.num_accepted == 0 and record.num_nodes
        for result in results
        for record in result.records
    )


def _law_of_two(network, prompt, rules):
    law = {}
    for first, probability in _next(network, prompt, rules).items():
        for second, other in _next(network, (*prompt, first), rules).items():
            law[first, second] = probability * other
    return law


def _next(network, token_ids, rules):
    with torch.inference_mode():
        logits = network(torch.tensor([token_ids])).logits[0, -1].double() / rules.temperature
    top = logits.topk(rules.top_k)
    return dict(zip(top.indices.tolist(), torch.softmax(top.values, 0).tolist(), strict=True))


def test_a_chat_over_http_is_the_chat_in_process(plain):
    app = create_app(plain, ServeOptions(served_model_name="smollm2"))
    body = {
        "model": "smollm2",
        "messages": CONVERSATION,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
    }
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    assert (
        answer["choices"][0]["message"]["content"]
        == plain.chat(CONVERSATION, max_new_tokens=NUM_TOKENS).text
    )
