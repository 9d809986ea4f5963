"""Grown networks say what the small one says, at another size; as GGUF files they are read back."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lab.grow.gguf_file import type_of, write_gguf
from lab.grow.k_quants import quantize
from lab.grow.network import Shape, grown, shape_for, write_grown
from monge.api import built_in, load
from monge.backends.cpu.gguf_blocks import BLOCK_TYPES
from monge.core.errors import OptionError, UnsupportedModelError
from monge.loading.networks import load_network, load_tokenizer
from monge.requests.chat_format import chat_format
from tests.engine.tiny import network, prompts

gguf = pytest.importorskip("gguf")
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


def steps_of(name, raw):
    """The largest step between neighbouring numbers of every group, `[groups, 1]`."""
    num_bytes, _, read = BLOCK_TYPES[name]
    blocks = read(torch.from_numpy(raw).unflatten(-1, (-1, num_bytes)))
    steps = blocks.halves[..., None, :1].float()
    if blocks.factors is not None:
        steps = steps * blocks.factors[..., :1]
    return steps.reshape(-1, 1).numpy() * (24 if name.startswith("IQ4") else 1)


@pytest.mark.parametrize(
    ("name", "mean"),
    [("Q2_K", 0.4), ("Q3_K", 0.21), ("Q4_K", 0.11), ("Q5_K", 0.055), ("Q6_K", 0.03)]
    + [("IQ4_NL", 0.12), ("IQ4_XS", 0.12)],
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 20), scale=st.integers(-4, 3), offset=st.sampled_from([0, -4, 4]))
def test_numbers_are_within_half_a_step(name, mean, seed, scale, offset):
    values = np.random.default_rng(seed).normal(offset, 1, (6, 512)) * 10.0**scale
    values[0, :300], values[1], values[2, 256:] = 0, 3.25, -7
    rows = values.astype(np.float32)
    raw = quantize(rows, name)
    error = np.abs(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]) - rows)
    steps = steps_of(name, raw)
    error, count = error.reshape(len(steps), -1), len(steps)
    largest = np.abs(rows.reshape(count, -1)).max(axis=1, keepdims=True)
    if name != "IQ4_NL":  # whose scale is that of a group
        largest = largest.reshape(12, -1).max(axis=1).repeat(count // 12)[:, None]
    assert (error <= steps / 2 + 1e-6 * largest).all()
    # A step is hardly longer than the range of a group asks for, unless scales are at their end.
    assert error[count // 2 :].mean() < mean * (1 + abs(offset)) * 10.0**scale


def test_types_are_mixed_as_llama_cpp_mixes_them():
    six = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    for layer, name in itertools.product(range(28), ("attn_v", "ffn_down")):
        found = type_of(f"blk.{layer}.{name}.weight", 1024, 28, "Q4_K_M", tied=True)
        assert found == ("Q6_K" if layer in six else "Q4_K")
    for name, depth, mix, tied, kind in (
        ("blk.0.attn_q.weight", 512, "Q4_K_M", True, "Q4_K"),
        ("blk.0.attn_q.weight", 576, "Q4_K_M", True, "Q5_0"),
        ("blk.0.attn_v.weight", 576, "Q4_K_M", True, "Q8_0"),
        ("blk.0.attn_v.weight", 576, "Q8_0", True, "Q8_0"),
        ("blk.0.attn_q.weight", 40, "Q8_0", True, "F16"),
        ("token_embd.weight", 512, "Q4_K_M", True, "Q6_K"),
        ("token_embd.weight", 512, "Q4_K_M", False, "Q4_K"),
        ("output.weight", 512, "Q4_K_M", False, "Q6_K"),
    ):
        assert type_of(name, depth, 28, mix, tied=tied) == kind, name


SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in (("Q8_0", 0.008), ("BF16", 0))]


@pytest.mark.parametrize(("mix", "distance"), [("Q4_K_M", 0.05), *SLOW])
def test_a_gguf_file_is_read_back(tmp_path, monkeypatch, mix, distance):
    monkeypatch.setenv("MONGE_CACHE", str(tmp_path / "cache"))
    source, path = built_in("target"), tmp_path / "new.gguf"
    target, tokenizer = load_network(source), load_tokenizer(source)
    counts = write_gguf(target, tokenizer, path, mix)
    tensors = gguf.GGUFReader(path).tensors
    assert counts == Counter(one.tensor_type.name for one in tensors)
    decoder = load(path, backend="eager", drafter="none")
    text = "Question: Tom has 12 apples, and can't eat 3.\nAnswer: \u00fcn\u00ef \u2192 5<|end|>\n\n  def f(x):"
    ids = tokenizer(text)["input_ids"]
    assert list(decoder.encode(text)) == ids
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    assert decoder.encode_chat(talk) == chat_format(tokenizer, is_built_in=True).encode(talk)
    difference = (laws(load_network(path), ids) - laws(target, ids)).abs().sum(dim=-1).mean() / 2
    assert difference <= distance
    assert (difference > 0) == (distance > 0)
    with pytest.raises(OptionError, match="exists; name another file"):
        write_gguf(target, tokenizer, path, mix)
    with pytest.raises(UnsupportedModelError, match="only Llama networks"):
        write_gguf(network("gpt2"), tokenizer, tmp_path / "other.gguf", mix)
    assert not [*tmp_path.glob("*.part")]


WRONG = {"folder --types Q8_0": "is a folder", "new.gguf --types Q4_K_L": "unknown mix of types"}


@pytest.mark.parametrize(("arguments", "message"), WRONG.items())
def test_types_that_do_not_fit(lab, tmp_path, arguments, message):
    result = lab("grow", f"{tmp_path}/{arguments}")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
