"""Grown networks say what the small one says, at another size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lab.grow.network import Shape, grown, num_parameters, shape_for, write_grown
from monge.api import built_in
from monge.core.errors import OptionError, UnsupportedModelError
from monge.loading.networks import load_network
from tests.engine.tiny import network, prompts

LAW_ERROR = 2e-6
"""Largest difference of a probability between float32 forwards with sums of another order and length."""


def laws(model, text):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double().softmax(-1)


@settings(max_examples=8, deadline=None)
@given(
    width=st.sampled_from([1, 2, 3, 4]),
    kv=st.sampled_from([1, 2, 3]),
    intermediate=st.integers(48, 130),
    layers=st.integers(2, 7),
    tied=st.booleans(),
)
def test_laws_are_kept(width, kv, intermediate, layers, tied):
    small = network("llama", "sdpa", tie_word_embeddings=tied)
    kv_width = kv if width % kv == 0 else 1
    shape = Shape(width=width, kv_width=kv_width, intermediate=intermediate, layers=layers)
    large = grown(small, shape)
    text = prompts((24,), seed=width)[0]
    assert (laws(large, text) - laws(small, text)).abs().max() < LAW_ERROR
    size = sum(weight.numel() for weight in large.parameters())
    assert size == shape.num_parameters(small.config)
    assert (large.lm_head.weight is large.model.embed_tokens.weight) is tied


@pytest.mark.parametrize(("size", "width"), [("0.1B", 2), ("0.5B", 4), ("1B", 8), ("8B", 16)])
def test_shapes_of_a_size(size, width):
    target = load_network(built_in("target"))
    shape = shape_for(target, num_parameters(size))
    assert shape.width == width
    assert shape.num_parameters(target.config) == pytest.approx(num_parameters(size), rel=0.04)


def test_a_folder_is_a_target_like_any_other(tmp_path):
    large = grown(network("llama", "sdpa"), Shape(width=2, kv_width=1, intermediate=64, layers=3))
    write_grown(large, AutoTokenizer.from_pretrained(built_in("target")), tmp_path / "new")
    text = prompts((24,), seed=1)[0]
    assert torch.equal(laws(load_network(tmp_path / "new"), text), laws(large, text))
    with pytest.raises(OptionError, match="exists and is no empty folder"):
        write_grown(large, None, tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot write the grown network"):
        write_grown(network("llama", "sdpa"), None, tmp_path / "file" / "new")


def test_shapes_that_do_not_fit():
    with pytest.raises(OptionError, match="no shape of 5e\\+06 parameters holds this network"):
        shape_for(load_network(built_in("target")), 5e6)
    with pytest.raises(OptionError, match="smaller than the network, which has 2 layers of 48"):
        grown(network("llama", "sdpa"), Shape(width=1, kv_width=1, intermediate=40, layers=2))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot be grown"):
        shape_for(network("gpt2"), 1e9)


def test_writes_a_folder(lab, tmp_path):
    result = lab("grow", str(tmp_path / "large"), "--params", "40M")
    assert result.exit_code == 0, result.output
    assert "parameters in" in result.output
    command = f"monge bench decode --target {tmp_path / 'large'} --draft"
    assert command in result.output.replace("\n", " ")
    assert load_network(tmp_path / "large").config.hidden_size == 256
