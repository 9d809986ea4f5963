"""Weights that change in place: no key and no value that others have computed is used afterwards."""

import copy
from typing import Any

import pytest
import torch

import monge
from monge.api import make_components
from monge.engine.batch import decode
from monge.engine.conversation import Conversation
from monge.engine.decoder import Decoder
from monge.networks.hf_tree import HfTreeModel
from monge.networks.prefix_cache import PrefixCache
from tests.engine.tiny import VOCAB, network

TEXT = tuple(torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(0)).tolist())


def step_of_an_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    model(torch.tensor([TEXT]), labels=torch.tensor([TEXT])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def copied_weights(model):
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.data = weight.data.flip(0)
    model.load_state_dict(other.state_dict())


def one_matrix(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)


def assigned_weights(model):
    negative = {name: -weight for name, weight in model.state_dict().items()}
    model.load_state_dict(negative, assign=True)


def new_parameter(model):
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(-2 * projection.weight.detach())


def data(model):
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight.data = -2 * projection.weight.data


def through_data(model):
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-2.0)


def replaced_layer(model):
    attention = model.model.layers[0].self_attn
    old = attention.v_proj
    attention.v_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    torch.nn.init.ones_(attention.v_proj.weight)


def swapped_layers(model):
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp
    own = first.self_attn
    own.k_proj, own.v_proj = own.v_proj, own.k_proj


def added_bias(model):
    projection = model.model.layers[0].self_attn.v_proj
    projection.bias = torch.nn.Parameter(torch.full((projection.out_features,), 3.0))


def buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.1)


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: -3 * output)


def scale(model):
    model.model.layers[0].self_attn.scaling = 3.0


def another_class(model):
    kind = type(model.model.norm)
    turned = {"forward": lambda self, states: -kind.forward(self, states)}
    model.model.norm.__class__ = type("Turned", (kind,), turned)


CHANGES = [step_of_an_optimizer, copied_weights, one_matrix]
UNCOUNTED = [assigned_weights, new_parameter, data, through_data, replaced_layer, swapped_layers]
UNCOUNTED += [added_bias, buffer, hook, scale, another_class]


def decoder_of(model) -> Any:
    target = HfTreeModel(model)
    return Decoder(make_components(target, drafter="suffix(max_history=200)"))


def written(decoder, prefixes=None):
    (session,) = decoder.sessions([TEXT], max_new_tokens=12)
    list(decode([session], decoder.components, max_batch_size=1, prefixes=prefixes))
    return session.completion_ids, session.num_cached


@pytest.mark.parametrize("change", [*CHANGES, *UNCOUNTED])
def test_a_prefix_cache_does_not_survive(change):
    model, prefixes = copy.deepcopy(network("llama")), PrefixCache(min_tokens=1)
    decoder = decoder_of(model)
    before = written(decoder, prefixes)
    again, num_cached = written(decoder, prefixes)
    assert (again, num_cached) == (before[0], len(TEXT) - 1), "it is used while the weights stay"
    change(model)
    fresh, _ = written(decoder_of(copy.deepcopy(model)))
    assert fresh != before[0]
    assert written(decoder, prefixes) == (fresh, 0)
    assert written(decoder, prefixes) == (fresh, len(TEXT) - 1)


def test_a_text_that_was_open_during_a_change_is_not_kept():
    model, prefixes = copy.deepcopy(network("llama")), PrefixCache(min_tokens=1)
    decoder = decoder_of(model)
    (session,) = decoder.sessions([TEXT], max_new_tokens=12)
    rounds = decode([session], decoder.components, max_batch_size=1, prefixes=prefixes)
    next(rounds)
    data(model)
    list(rounds)
    fresh, _ = written(decoder_of(copy.deepcopy(model)))
    assert written(decoder, prefixes) == (fresh, 0)


def test_without_that_the_text_would_be_another_one(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_drop_stale", lambda *_: None)
    model, prefixes = copy.deepcopy(network("llama")), PrefixCache(min_tokens=1)
    decoder = decoder_of(model)
    written(decoder, prefixes)
    step_of_an_optimizer(model)
    stale, num_cached = written(decoder, prefixes)
    assert num_cached == len(TEXT) - 1
    assert stale != written(decoder_of(copy.deepcopy(model)))[0]


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_a_decoder_and_of_the_host_keep_no_cache(change):
    """Only texts are kept, and a text is no more than a draft."""
    model = monge.accelerate(copy.deepcopy(network("llama")), drafter="suffix(max_history=200)")
    decoder, ids = decoder_of(model), torch.tensor([TEXT])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for _ in range(2):
        plain = monge.restore(copy.deepcopy(model)).generate(ids, **options)[0, len(TEXT) :]
        (result,) = decoder.generate([TEXT], max_new_tokens=12)
        assert result.token_ids == tuple(plain.tolist())
        assert torch.equal(model.generate(ids, **options)[0, len(TEXT) :], plain)
        assert decoder.components.target._cache.num_open == 0
        change(model)


def test_a_conversation_reads_its_turns_again():
    decoder: Any = monge.load(controller="fixed")
    conversation = Conversation(decoder, max_new_tokens=12)
    "".join(piece.text for piece in conversation.reply("Name a colour."))
    with torch.no_grad():
        layer = decoder.components.target.network.model.layers[0]
        layer.self_attn.v_proj.weight.mul_(-2.0)
    turns = [*conversation.messages, {"role": "user", "content": "Why?"}]
    answer = "".join(piece.text for piece in conversation.reply("Why?"))
    assert conversation.sessions[-1].num_cached == 0
    assert answer == decoder.chat(turns, max_new_tokens=12).text
    conversation.close()
