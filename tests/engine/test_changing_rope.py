"""Rotary embeddings that change with the length of the text: the text is the host's, before the change and beyond it."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import monge
from monge.api import make_components
from monge.backends.registry import Compiled
from monge.core.errors import BackendError
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.networks.hf_chain import HfChainModel
from monge.networks.hf_tree import HfTreeModel
from monge.networks.prefix_cache import PrefixCache
from tests.engine.tiny import COMMON, VOCAB, perturbed

pytestmark = pytest.mark.filterwarnings("ignore:the rotary embedding of")

LIMIT = 24
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 100.0}
LONG |= {"original_max_position_embeddings": LIMIT}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
NETWORKS = {
    "phi3": ("phi3", LONG, {"original_max_position_embeddings": LIMIT}),
    "longrope": ("llama", LONG, {}),
    "dynamic": ("llama", DYNAMIC, {"max_position_embeddings": LIMIT}),
}


def network(name: str) -> Any:
    kind, rope, settings = NETWORKS[name]
    sizes = COMMON | {"max_position_embeddings": 4 * LIMIT, "rope_parameters": dict(rope)}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | settings))).eval()


def prompt(length: int) -> list[int]:
    return [(31 * place + place * place) % (VOCAB - 4) + 3 for place in range(length)]


def expected(name: str, token_ids: list[int], count: int) -> list[int]:
    """The text that plain `generate` of a fresh network writes."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    text = network(name).generate(torch.tensor([token_ids]), **options)
    return text[0, len(token_ids) :].tolist()


def written(decoder: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    results = decoder.generate(prompts, max_new_tokens=count, ignore_eos=True)
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", [HfTreeModel, HfChainModel])
@pytest.mark.parametrize("drafter", ["ngram(min_ngram=1)", "model"])
def test_texts_are_those_of_the_host(name, kind, drafter):
    net = network(name)
    draft: Any = None
    options: dict[str, Any] = {"drafter": drafter, "controller": "fixed"}
    if drafter == "model":
        draft = HfTreeModel(perturbed(net))
        options["tree"] = "chain(4)"
    decoder = Decoder(make_components(kind(net), draft, **options))
    ends = (LIMIT - 3, 9), (LIMIT - 1, 6), (LIMIT, 6), (LIMIT + 1, 6)
    for length, count in ((8, 30), *ends, (50, 9), (9, 8)):
        text = expected(name, prompt(length), count)
        assert written(decoder, [prompt(length)], count) == [text], (length, count)


@pytest.mark.parametrize("name", NETWORKS)
def test_requests_of_a_batch_do_not_change_each_other(name):
    decoder = monge.load(network(name), drafter="ngram(min_ngram=1)", controller="fixed")
    prompts = [prompt(length) for length in (50, 5, LIMIT - 2, 12, 40)]
    texts = [expected(name, one, 14) for one in prompts]
    assert written(decoder, prompts, 14) == texts


def test_drafts_are_verified_before_the_change_and_none_beyond_it():
    decoder = monge.load(network("phi3"), drafter="ngram(min_ngram=1)", controller="fixed")
    repeated = [5, 6, 7, 8] * 4
    (request,) = decoder.requests([repeated], max_new_tokens=40, ignore_eos=True)
    session = decoder.session(request)
    with pytest.warns(UserWarning, match=r"embedding of Phi3.* \(longrope\) changes.*24 tokens"):
        for _ in decode([session], decoder.components, max_batch_size=1):
            pass
    depths = {record.context_length: record.depth for record in session.records}
    assert any(depth for length, depth in depths.items() if length < LIMIT)
    assert not any(depth for length, depth in depths.items() if length >= LIMIT)


@pytest.mark.parametrize("name", NETWORKS)
def test_keys_of_a_short_text_are_not_taken_for_those_of_a_long_one(name):
    net = network(name)
    decoder = monge.load(net, drafter="none")
    prefixes = PrefixCache(min_tokens=1)
    for length in (LIMIT - 8, LIMIT + 8, LIMIT - 4):
        (request,) = decoder.requests([prompt(length)], max_new_tokens=12, ignore_eos=True)
        session = decoder.session(request)
        for _ in decode([session], decoder.components, max_batch_size=1, prefixes=prefixes):
            pass
        assert list(session.completion_ids) == expected(name, prompt(length), 12)


def test_a_text_longer_than_stretched_positions_is_refused():
    decoder = monge.load(network("dynamic"), drafter="none")
    with pytest.raises(monge.ContextLengthError, match=f"context length of {4 * LIMIT} tokens"):
        decoder.generate([prompt(90)], max_new_tokens=7)


@pytest.mark.parametrize("name", NETWORKS)
def test_another_embedding_has_the_frequencies_of_the_length_too(name):
    net = network(name)
    decoder = monge.load(net, drafter="none")
    assert written(decoder, [prompt(50)], 8) == [expected(name, prompt(50), 8)]
    net.model.rotary_emb = copy.deepcopy(net.model.rotary_emb)
    for length in (LIMIT - 3, 50, LIMIT - 1):
        assert written(decoder, [prompt(length)], 8) == [expected(name, prompt(length), 8)]


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_are_rounded_anew_have_them_too(name, monkeypatch):
    def refused(*_):
        raise BackendError("not here")

    monkeypatch.setattr(Compiled, "_on_cpu", refused)  # which saves a minute
    net, backend = network(name), "compiled(weights='bfloat16')"
    with pytest.warns(UserWarning, match="runs eagerly"):
        decoder, other = (monge.load(net, drafter="none", backend=backend) for _ in range(2))
    text = written(decoder, [prompt(50)], 8)
    other.update_weights()
    assert written(other, [prompt(50)], 8) == text
