"""The fallback for networks that cannot read trees.

Rollback, windows, recurrent state, long prompts.
"""

import random
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.networks.base import NodeBlock
from monge.networks.hf_chain import CacheSnapshot, HfChainModel
from monge.networks.hf_tree import HfTreeModel
from tests.engine.tiny import COMMON, STATEFUL, network, perturbed, prompts, seeded
from tests.parity.comparing import assert_same_tokens, fresh_logits, plain_greedy

LARGEST_DIFFERENCE = 5e-5
LARGEST_OF_STATES = 5e-4  # a state is read in parts of other sizes


def stateful(name):
    config = AutoConfig.for_model(name, **{**COMMON, **STATEFUL[name]})
    made = partial(AutoModelForCausalLM.from_config, config, attn_implementation="eager")
    return seeded(lambda: made().float().eval())


# As where the attention kernel takes no 4-D mask: the network could read trees, but not through
# this kernel.
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gemma3"])
def test_windowed_layers_take_tokens_back(name):
    target, draft = HfChainModel(network(name)), HfChainModel(perturbed(network(name)))
    texts = prompts((9, 4), seed=5)
    decoder = Decoder(make_components(target, draft, tree="chain(4)"))
    results = decoder.generate(texts, max_new_tokens=30, ignore_eos=True)
    for prompt, result in zip(texts, results, strict=True):
        expected = plain_greedy(network(name), prompt, 30)
        assert_same_tokens(network(name), prompt, result.token_ids, expected)
        assert 1.05 < result.stats.block_efficiency < 4


@pytest.mark.parametrize("lengths", [(1,), (1, 5), (30, 1, 9, 24)])
@pytest.mark.parametrize("cls", [HfTreeModel, HfChainModel])
def test_prompts_of_any_length_are_read_in_parts(monkeypatch, cls, lengths):
    monkeypatch.setattr("monge.networks.hf_tree._PREFILL", 8)
    monkeypatch.setattr("monge.networks.hf_chain._PREFILL", 8)
    check_last_logits(cls(network("mistral_window")), network("mistral_window"), lengths)


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_state_survives_a_long_prompt(monkeypatch, name):
    monkeypatch.setattr("monge.networks.hf_chain._PREFILL", 4)
    target = stateful(name)
    check_last_logits(HfChainModel(target), target, (11, 1, 6))


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize("most_unread", [0, 3, 16])
def test_recurrent_state_returns_to_the_committed_text(monkeypatch, most_unread):
    """Rounds of chains, of which any number of nodes is accepted, in several texts."""
    monkeypatch.setattr("monge.networks.hf_chain._MOST_UNREAD", most_unread)
    target = stateful("qwen3_next")
    check_rounds(HfChainModel(target), target)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("forgotten", ["recurrent_states", "conv_states", "keys"])
def test_a_state_that_does_not_return_is_found(monkeypatch, forgotten):
    restore = CacheSnapshot.restore

    def forget(self, cache):
        kept = [vars(layer).get(forgotten) for layer in cache.layers]
        restore(self, cache)
        for layer, value in zip(cache.layers, kept, strict=True):
            if value is not None:
                vars(layer)[forgotten] = value

    monkeypatch.setattr(CacheSnapshot, "restore", forget)
    target = stateful("qwen3_next")
    with pytest.raises((AssertionError, RuntimeError)):
        check_rounds(HfChainModel(target), target)


@pytest.mark.filterwarnings("ignore")
def test_a_forward_that_fails_between_two_layers_leaves_no_trace():
    target, (text,) = stateful("qwen3_next"), prompts((9,), seed=3)
    model = HfChainModel(target)
    model.open({0: text[:-1]})

    def fail(*_):
        raise RuntimeError("no memory")

    handle = target.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        model.extend({0: NodeBlock.chain((text[-1], 5, 6))})
    handle.remove()
    model.commit({0: ()})
    logits = model.extend({0: NodeBlock.chain((text[-1], 5, 6))})[0]
    expected = fresh_logits(target, (*text, 5, 6))[-3:]
    torch.testing.assert_close(logits, expected, atol=LARGEST_OF_STATES, rtol=0)


def check_rounds(model, plain):
    rng = random.Random(4)
    texts = dict(enumerate(prompts((9, 1, 4), seed=3)))
    model.open({row: text[:-1] for row, text in texts.items()})
    for _ in range(12):
        blocks = {
            row: (text[-1], *rng.choices(range(3, 20), k=rng.randrange(5)))
            for row, text in texts.items()
        }
        logits = model.extend({row: NodeBlock.chain(block) for row, block in blocks.items()})
        accepted = {row: rng.randrange(len(block)) for row, block in blocks.items()}
        for row, block in blocks.items():
            expected = fresh_logits(plain, (*texts[row][:-1], *block))[-len(block) :]
            torch.testing.assert_close(logits[row], expected, atol=LARGEST_OF_STATES, rtol=0)
            emitted = rng.randrange(3, 20)
            texts[row] = (*texts[row][:-1], *block[: accepted[row] + 1], emitted)
        model.commit({row: range(count + 1) for row, count in accepted.items()})
        assert all(model.length(row) == len(text) - 1 for row, text in texts.items())


def check_last_logits(model, plain, lengths):
    texts = dict(enumerate(prompts(lengths, seed=9)))
    model.open({row: text[:-1] for row, text in texts.items()})
    blocks = {row: NodeBlock.chain(text[-1:]) for row, text in texts.items()}
    for row, logits in model.extend(blocks).items():
        expected = fresh_logits(plain, texts[row])[-1:]
        torch.testing.assert_close(logits, expected, atol=LARGEST_DIFFERENCE, rtol=0)
