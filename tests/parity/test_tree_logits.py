"""Every node of a tree has the logits that a plain forward over its own text has, whatever was committed before."""

import shutil

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.tiny import TREE_FAMILIES, network, prompts
from tests.parity.comparing import RandomGrowth

ROUNDS = 8
LARGEST_DIFFERENCE = 5e-5
"""Allowed between two float32 forwards in another order of summation.

Logits reach 6, and the largest seen is 1.5e-5.
"""


def check(
    model: PreTrainedModel, rounds: int = ROUNDS, reference: PreTrainedModel | None = None
) -> None:
    growth = RandomGrowth(model, prompts((9, 4, 6), seed=1), seed=2, reference=reference)
    differences = [growth.round(compare=True) for _ in range(rounds)]
    assert growth.non_prefix_commits > rounds, "the rounds were to move columns of the cache"
    assert max(differences) < LARGEST_DIFFERENCE, differences


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_eager(name):
    check(network(name))


# Which has no sdpa.
@pytest.mark.parametrize("name", [name for name in TREE_FAMILIES if name != "gemma2"])
def test_sdpa(name):
    check(network(name, "sdpa"))


# The unfused form warns that it is slow; it has the mask semantics of the kernel and needs no
# compiler.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
# Torch's own, when it first imports its compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3"])
def test_flex_attention(name):
    torch.compiler.set_stance("force_eager")
    try:
        check(network(name, "flex_attention"), rounds=3, reference=network(name))
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_flex_attention():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(
            "compiling flex_attention for the CPU needs a C++ compiler, and none is on the path"
        )
    check(network("llama", "flex_attention"), rounds=2, reference=network("llama"))


def test_a_wrong_mask_is_seen(monkeypatch):
    monkeypatch.setattr("monge.networks.attention_masks.UncommittedNodes.visible", _sees_everything)
    with pytest.raises(AssertionError):
        check(network("llama"))


@pytest.mark.parametrize("name", ["mistral_window", "gemma3"])
def test_a_missing_window_is_seen(monkeypatch, name):
    monkeypatch.setattr("monge.networks.attention_masks.within_window", lambda visible, *_: visible)
    with pytest.raises(AssertionError):
        check(network(name))


def _sees_everything(nodes, first):
    total = len(nodes)
    return torch.ones(total - first, total, dtype=torch.bool).tril(first).numpy()


def test_no_drift_over_many_rounds():
    growth = RandomGrowth(
        network("llama", max_position_embeddings=4096), prompts((9, 4), seed=3), seed=4
    )
    differences = [growth.round(compare=number % 60 == 0) for number in range(1, 301)]
    assert min(map(len, growth.texts.values())) > 600, "the cache was to grow several times"
    assert max(differences) < LARGEST_DIFFERENCE, [value for value in differences if value]
