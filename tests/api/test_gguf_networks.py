"""The network of a GGUF file is the one that its header and its tensors describe, or the file is refused by name."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import monge
from monge.core.errors import ModelLoadError
from monge.loading.gguf_files import converted
from monge.loading.networks import load_network
from tests.api.test_gguf import WORDS
from tests.engine.compiling import require

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 2),
}
CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "gemma3": "Gemma3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.5, 2.0, 4.0], [2.0, 3.0, 5.0, 9.0]


def network(architecture: str, **settings: Any) -> Any:
    """A tiny network of random weights."""
    name = CLASSES[architecture]
    kind = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
    torch.manual_seed(0)
    return getattr(transformers, name + "ForCausalLM")(kind(**SIZES | settings)).eval()


def write(path, model, architecture, *, keys=None, tensors=None, without=(), general=None):
    """A network in the form that llama.cpp's converter writes, in float32.

    Args:
        keys: Further keys of the architecture; one that is `None` is left out.
        tensors: Further tensors.
        without: Tensors that are left out.
        general: Further keys.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    described = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    epsilon = "layer_norm" if architecture in {"stablelm", "starcoder2"} else "layer_norm_rms"
    described[f"attention.{epsilon}_epsilon"] = 1e-5
    add = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    for name, value in {
        **{f"{architecture}.{key}": value for key, value in (described | (keys or {})).items()},
        **(general or {}),
    }.items():
        if value is not None:
            getattr(writer, f"add_{add[type(value)]}")(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 4 + [1] * (len(WORDS) - 4))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for full, weights in model.state_dict().items():
        name, values = names.get_name(full, (".weight", ".bias")), weights.float()
        for part, heads in (
            ("attn_q.", described["attention.head_count"]),
            ("attn_k.", config.num_key_value_heads),
        ):
            if architecture == "llama" and part in name:
                values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(values.numpy()))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scaling(**keys: object) -> dict[str, Any]:
    return {f"rope.scaling.{name}": value for name, value in keys.items()}


def llama3_factors() -> list[float]:
    original = network("llama", rope_parameters=dict(LLAMA3)).model.rotary_emb.inv_freq
    plain = network("llama").model.rotary_emb.inv_freq
    return (plain / original).tolist()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONGE_CACHE", str(folder))
        yield folder


def logits(model):
    with torch.inference_mode():
        return model(torch.arange(100)[None] * 7 % len(WORDS)).logits[0].double()


def check_law(path, model, *, packs=True):
    """The law of the next token is the original's in both forms of the file."""
    expected = logits(model).softmax(-1)
    for file_weights in (False, True) if packs else (False,):
        law = logits(load_network(converted(path, file_weights=file_weights))).softmax(-1)
        assert (law - expected).abs().sum(-1).max() < 1e-3, f"file_weights={file_weights}"


@pytest.mark.parametrize(
    ("architecture", "rope", "keys", "tensors"),
    [
        ("llama", {}, {}, {}),
        ("llama", {"rope_type": "linear", "factor": 4.0}, scaling(type="linear", factor=4.0), {}),
        ("llama", {"rope_type": "linear", "factor": 4.0}, scaling(factor=4.0), {}),
        ("llama", {"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}, {}),
        ("llama", {}, scaling(type="none", factor=4.0), {}),
        ("llama", YARN, scaling(**YARN_KEYS), {}),
        (
            "llama",
            YARN | {"attention_factor": 1.4, "beta_fast": 8.0, "beta_slow": 2.0},
            scaling(
                **YARN_KEYS,
                yarn_attn_factor=1.4,
                yarn_beta_fast=8.0,
                yarn_beta_slow=2.0,
                yarn_ext_factor=1.0,
            ),
            {},
        ),
        (
            "llama",
            YARN | {"attention_factor": 1.2 * (0.1 * math.log(4) + 1)},
            scaling(**YARN_KEYS, attn_factor=1.2),
            {},
        ),
        ("llama", LLAMA3, {}, {"rope_freqs.weight": llama3_factors}),
        ("qwen2", YARN, scaling(**YARN_KEYS), {}),
        ("qwen3", YARN, scaling(**YARN_KEYS), {}),
        ("stablelm", YARN | {"rope_theta": 500.0}, scaling(**YARN_KEYS), {}),
        ("starcoder2", {"rope_theta": 500.0}, {}, {}),
        ("starcoder2", {"rope_type": "linear", "factor": 4.0}, scaling(factor=4.0), {}),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": SHORT,
                "long_factor": LONG,
                "attention_factor": 1.3,
            },
            scaling(original_context_length=64, attn_factor=1.3),
            {"rope_factors_short.weight": lambda: SHORT, "rope_factors_long.weight": lambda: LONG},
        ),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [4.0] * 4,
                "long_factor": [4.0] * 4,
                "attention_factor": 1.0,
            },
            scaling(factor=4.0),
            {},
        ),
        ("phi3", {"partial_rotary_factor": 0.5}, {}, {}),
    ],
)
def test_a_rotary_embedding_is_that_of_the_file(cache, tmp_path, architecture, rope, keys, tensors):
    require("compiled")
    settings: dict[str, Any] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | rope
    }
    if architecture == "phi3":
        settings["original_max_position_embeddings"] = 64
    if architecture == "qwen3":
        settings["head_dim"] = 8
    if architecture == "starcoder2":
        settings |= {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    if architecture == "stablelm":
        settings |= {"layer_norm_eps": 1e-5}
    model = network(architecture, **settings)
    files = {name: values() for name, values in tensors.items()}
    path = write(tmp_path / f"{architecture}.gguf", model, architecture, keys=keys, tensors=files)
    check_law(path, model)


def test_windows_bases_and_caps_are_those_of_the_file(cache, tmp_path):
    require("compiled")
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    model = network(
        "gemma3",
        **{"num_hidden_layers": 6, "head_dim": 8, "sliding_window": 5, "rope_parameters": rope},
        **{
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    keys = {
        **{"attention.sliding_window": 5, "attention.sliding_window_pattern": 3},
        **{"rope.freq_base_swa": 300.0, "final_logit_softcapping": 3.0},
    }
    path = write(tmp_path / "gemma3.gguf", model, "gemma3", keys=keys | scaling(factor=8.0))
    check_law(path, model)
    model = network("phi3", sliding_window=6)
    path = write(tmp_path / "phi3.gguf", model, "phi3", keys={"attention.sliding_window": 6})
    check_law(path, model, packs=False)


def test_factors_of_any_kind_and_scaling_meet(cache, tmp_path):
    """llama.cpp divides frequencies by the factors, whatever the scaling is."""
    model = network("llama", rope_parameters=dict(YARN))
    for name in ("inv_freq", "original_inv_freq"):
        getattr(model.model.rotary_emb, name).div_(torch.tensor(SHORT))
    tensors = {"rope_freqs.weight": SHORT}
    path = write(tmp_path / "both.gguf", model, "llama", keys=scaling(**YARN_KEYS), tensors=tensors)
    check_law(path, model, packs=False)


def test_phi3_scales_as_other_networks_do(cache, tmp_path):
    """The host's own Phi-3 knows no YaRN, so its frequencies are compared with those of a Llama."""
    expected = network("llama", rope_parameters=dict(YARN)).model.rotary_emb
    path = write(tmp_path / "yarn.gguf", network("phi3"), "phi3", keys=scaling(**YARN_KEYS))
    rotary = load_network(path).model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, expected.inv_freq)
    assert rotary.attention_scaling == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16"),
        ({"attention.scale": 0.2}, r"llama.attention.scale = 0.2"),
        ({"attention.causal": False}, "llama.attention.causal = False"),
        ({"attention.value_length": 4}, "llama.attention.value_length = 4"),
        (
            {"attention.key_length": 16, "attention.value_length": 16},
            "llama.rope.dimension_count = 8",
        ),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30"),
        ({"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ({"something.new": 3}, "llama.something.new = 3"),
        ({"rope.freq_base_swa": 300.0}, "llama.rope.freq_base_swa = 300"),
        (scaling(type="other"), "rotary embedding .*rope.scaling.type = other"),
        (scaling(type="longrope"), "rotary embedding .*rope_factors_short.weight"),
        (scaling(yarn_ext_factor=0.5), "rotary embedding .*yarn_ext_factor"),
        (scaling(yarn_log_multiplier=0.5), "llama.rope.scaling.yarn_log_multiplier = 0.5"),
        ({"embedding_length": None}, "has no llama.embedding_length"),
        ({"attention.head_count": None}, "has no llama.attention.head_count"),
        ({"block_count": None}, "has no llama.block_count"),
        (
            {"attention.layer_norm_rms_epsilon": None},
            "has no llama.attention.layer_norm_rms_epsilon",
        ),
    ],
)
def test_keys_that_nobody_honours_are_refused_by_name(cache, tmp_path, keys, named):
    path = write(tmp_path / "strange.gguf", network("llama"), "llama", keys=keys)
    for backend in ("eager", None):
        with pytest.raises(ModelLoadError, match=named):
            monge.load(path, drafter="none", backend=backend)
    assert not list((cache / "gguf").glob("strange*"))


def test_keys_that_change_nothing_are_taken(cache, tmp_path):
    keys = {
        **{"attention.sliding_window": 256, "attention.scale": 8**-0.5, "attention.causal": True},
        **{"expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0, "pooling_type": 0},
        **scaling(finetuned=True, attn_factor=1.0, yarn_log_multiplier=0.0),
        "tensor_data_layout": "Meta AI original pth",
    }
    model = network("llama")
    path = write(tmp_path / "plain.gguf", model, "llama", keys=keys)
    check_law(path, model, packs=False)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"without": ["blk.0.attn_v.weight"]}, "tensor blk.0.attn_v.weight is missing"),
        (
            {"without": ["blk.1.ffn_norm.weight", "blk.0.ffn_up.weight"]},
            r"blk.0.ffn_up.weight .*1 other",
        ),
        (
            {"tensors": {"blk.0.attn_q.bias": [0.0] * 32}},
            "tensor blk.0.attn_q.bias is read by no part",
        ),
        (
            {"tensors": {"rope_freqs.weight": [1.0]}},
            "rotary .*rope_freqs.weight has 1 numbers; expected 4",
        ),
        ({"tensors": {"rope_factors_long.weight": LONG}}, "rotary .*rope_factors_short.weight and"),
        ({"general": {"general.type": "adapter"}}, "no whole model .general.type = adapter"),
        ({"general": {"general.type": "mmproj"}}, "no whole model .general.type = mmproj"),
        ({"general": {"adapter.type": "lora"}}, "no whole model"),
        ({"general": {"split.count": 3}}, "one of 3 parts .split.count"),
    ],
)
def test_tensors_and_kinds_are_refused_by_name(cache, tmp_path, more, named):
    path = write(tmp_path / "strange.gguf", network("llama"), "llama", **more)
    for backend in ("eager", None):
        with pytest.raises(ModelLoadError, match=named):
            monge.load(path, drafter="none", backend=backend)
    assert not list((cache / "gguf").glob("strange*"))


def test_a_truncated_file_is_told_in_one_sentence(cache, tmp_path):
    whole = write(tmp_path / "whole.gguf", network("llama"), "llama").read_bytes()
    for size in (5, 20, 30, 200, 2000, len(whole) // 2, len(whole) - 40):
        (path := tmp_path / "part.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match="it may be truncated, so fetch it again") as error:
            monge.load(path)
        text = str(error.value)
        assert "dtype" not in text
        assert ("promises" in text) == (size > 3000), (size, text)
