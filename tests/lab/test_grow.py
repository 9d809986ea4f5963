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
    shape = Shape(
        width=width, kv_width=kv if width % kv == 0 else 1, intermediate=intermediate, layers=layers
    )
    large = grown(small, shape)
    text = prompts((24,), seed=width)[0]
    assert (laws(large, text) - laws(small, text)).abs().max() < LAW_ERROR
    assert sum(weight.numel() for weight in large.parameters()) == shape.num_parameters(
        small.config
    )
    assert (large.lm_head.weight is large.model.embed_tokens.weight) is tied


def test_growing_is_not_trivial():
    small = network("llama", "sdpa")
    large = grown(small, Shape(width=2, kv_width=2, intermediate=96, layers=4))
    large.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    text = prompts((24,), seed=1)[0]
    assert (laws(large, text) - laws(small, text)).abs().max() > 100 * LAW_ERROR


def test_added_layers_read_and_do_not_write():
    large = grown(network("llama", "sdpa"), Shape(width=2, kv_width=1, intermediate=48, layers=4))
    written = [bool(layer.self_attn.o_proj.weight.any()) for layer in large.model.layers]
    assert written == [True, False, True, False]
    assert all(layer.self_attn.q_proj.weight.any() for layer in large.model.layers)


def test_the_built_in_target():
    small = load_network(built_in("target"))
    large = grown(small, Shape(width=2, kv_width=1, intermediate=1024, layers=13))
    text = AutoTokenizer.from_pretrained(built_in("target"))(
        "The history of the city begins with a river."
    )["input_ids"]
    assert (laws(large, text) - laws(small, text)).abs().max() < LAW_ERROR


@pytest.mark.parametrize(("size", "width"), [("0.1B", 2), ("0.5B", 4), ("1B", 8), ("8B", 16)])
def test_shapes_of_a_size(size, width):
    target = load_network(built_in("target"))
    shape = shape_for(target, num_parameters(size))
    assert shape.width == width
    assert shape.num_parameters(target.config) == pytest.approx(num_parameters(size), rel=0.04)


class TestFolders:
    def test_a_folder_is_a_target_like_any_other(self, tmp_path):
        small = network("llama", "sdpa")
        large = grown(small, Shape(width=2, kv_width=1, intermediate=64, layers=3))
        write_grown(large, AutoTokenizer.from_pretrained(built_in("target")), tmp_path / "new")
        again = load_network(tmp_path / "new")
        text = prompts((24,), seed=1)[0]
        assert torch.equal(laws(again, text), laws(large, text))
        with pytest.raises(OptionError, match="exists and is no empty folder"):
            write_grown(large, None, tmp_path / "new")

    def test_no_room(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OptionError, match="cannot write the grown network"):
            write_grown(network("llama", "sdpa"), None, tmp_path / "file" / "new")


class TestRefusals:
    @pytest.mark.parametrize("text", ["", "many", "0B", "-1B", "1T"])
    def test_sizes_that_are_none(self, text):
        with pytest.raises(OptionError, match="cannot read the size"):
            num_parameters(text)

    def test_a_size_below_the_network(self):
        with pytest.raises(OptionError, match="no shape of 5e\\+06 parameters holds this network"):
            shape_for(load_network(built_in("target")), 5e6)

    def test_a_smaller_shape(self):
        with pytest.raises(
            OptionError, match="is smaller than the network, which has 2 layers of 48 neurons"
        ):
            grown(network("llama", "sdpa"), Shape(width=1, kv_width=1, intermediate=40, layers=2))

    def test_another_family(self):
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot be grown"):
            shape_for(network("gpt2"), 1e9)
