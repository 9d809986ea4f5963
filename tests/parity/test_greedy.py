"""Greedy decoding writes what `model.generate` writes, token for token, for every family, tree and batch."""

from functools import cache
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import monge
from monge.core.errors import UnsupportedModelError
from tests.engine.tiny import (
    CHAIN_FAMILIES,
    COMMON,
    EOS,
    PAD,
    STATEFUL,
    TREE_FAMILIES,
    VOCAB,
    network,
    perturbed,
    prompts,
    seeded,
)
from tests.parity.comparing import assert_same_tokens, plain_greedy

NUM_TOKENS = 24  # all prompts cross the sliding window
PROMPTS = prompts((9, 4, 7, 11), seed=5)
TREES = {
    "fixed_width": "fixed_width((3, 2, 1), children='top')",
    "best_first": "best_first(num_nodes=10)",
    "chain": "chain(4)",
}


@cache
def plain(target):
    return [plain_greedy(target, prompt, NUM_TOKENS) for prompt in PROMPTS]


def check(target, **options):
    """The same four continuations as plain decoding, alone and together.

    Some drafts accepted, some not.
    """
    decoder = monge.load(target, max_batch_size=4, **{"controller": "fixed", **options})
    expected = plain(target)
    alone = decoder.generate([PROMPTS[0]], max_new_tokens=NUM_TOKENS, ignore_eos=True)
    together = decoder.generate(PROMPTS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    for prompt, result, tokens in zip(
        [PROMPTS[0], *PROMPTS], alone + together, [expected[0], *expected], strict=True
    ):
        assert_same_tokens(target, prompt, result.token_ids, tokens)
    rounds = sum(result.stats.num_rounds for result in together)
    return len(PROMPTS) * NUM_TOKENS / rounds


@pytest.mark.parametrize(
    ("name", "tree"),
    # A shape decides the mask, whatever the family: not every family drafts every shape.
    [
        *product(TREE_FAMILIES, ["fixed_width"]),
        *product(["llama", "gemma3"], ["best_first", "chain"]),
    ],
)
def test_trees(name, tree):
    target = network(name)
    tokens_a_round = check(target, draft=perturbed(target), tree=TREES[tree])
    assert 1.05 < tokens_a_round < 4, (
        "the draft model is to be right now and then, and wrong now and then"
    )


# Which has no sdpa.
@pytest.mark.parametrize("name", [name for name in TREE_FAMILIES if name != "gemma2"])
def test_sdpa(name):
    target = network(name, "sdpa")
    assert 1.05 < check(target, draft=perturbed(target), tree=TREES["best_first"]) < 4


def test_sampled_tree():
    assert (
        1.05
        < check(network("llama"), draft=perturbed(network("llama")), tree="fixed_width((3, 2, 1))")
        < 4
    )


@pytest.mark.parametrize("name", CHAIN_FAMILIES)
def test_chains(name):
    target = network(name)
    assert 1.05 < check(target, draft=perturbed(target), tree="chain(4)") < 4
    with pytest.raises(UnsupportedModelError, match="use tree='chain'"):
        monge.load(target, perturbed(target), tree="best_first")


def test_another_network_of_the_family_drafts():
    target = network("llama")
    assert check(target, draft=network("llama", num_hidden_layers=1)) >= 1


def test_chain_family_drafts_for_a_tree_family():
    target = network("llama")
    assert check(target, draft=network("bloom"), tree="chain(3)") >= 1


def stateful(name):
    config = AutoConfig.for_model(name, **{**COMMON, **STATEFUL[name]})
    target = seeded(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    )
    assert len(set(plain(target)[0])) > 4, "a constant text would prove nothing"
    return target


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen3_next"))
        for name in STATEFUL
        if name != "mamba"
    ],
)
def test_recurrent_state_reads_chains(name):
    target = stateful(name)
    assert check(target, drafter="none") == 1
    assert 1.05 < check(target, draft=perturbed(target), tree="chain(4)") < 4
    assert check(network("llama"), draft=target, tree="chain(3)") >= 1
    with pytest.raises(UnsupportedModelError, match="recurrent state.*use tree='chain'"):
        monge.load(target, perturbed(target), tree="best_first")


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
def test_a_state_that_is_lost_is_decoded_plainly_or_refused():
    target = stateful("mamba")
    assert check(target, drafter="none") == 1
    for options in ({"drafter": "ngram"}, {"draft": network("llama")}):
        with pytest.raises(UnsupportedModelError, match="recurrent state.*use drafter='none'"):
            monge.load(target, **options)
    with pytest.raises(UnsupportedModelError, match="draft model cannot draft.*recurrent state"):
        monge.load(network("llama"), target)
    inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match="recurrent state.*use drafter='none'"):
        target.generate(**inputs, custom_generate=monge.speculate)
    plain = target.generate(**inputs)
    assert torch.equal(
        target.generate(**inputs, custom_generate=monge.speculate, drafter="none"), plain
    )


def test_special_tokens_of_the_tiny_networks():
    config = network("llama").generation_config
    assert (config.eos_token_id, config.pad_token_id) == (EOS, PAD)
    assert network("llama").config.vocab_size == VOCAB
