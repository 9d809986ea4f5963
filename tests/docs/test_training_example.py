"""Models that the example of the built-in pair starts from nothing, and what its command line refuses."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = Path(__file__).parents[2] / "src" / "monge" / "models" / "target"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_default_pair

    yield train_default_pair
    for name in ("train_default_pair", "default_pair_data", "default_pair_evaluation"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_new_models_have_the_targets_vocabulary_and_the_given_sizes(example, family):
    config = AutoConfig.from_pretrained(TARGET)
    sizes = argparse.Namespace(layers=1, hidden=64, intermediate=32, seed=3)
    first, second = (example.new_model(config, family, sizes) for _ in range(2))
    own = first.config
    assert own.model_type == family
    assert (own.num_hidden_layers, own.hidden_size, own.intermediate_size) == (1, 64, 32)
    assert (own.vocab_size, own.eos_token_id) == (config.vocab_size, config.eos_token_id)
    assert first(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, config.vocab_size)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
