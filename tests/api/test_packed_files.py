"""GGUF files whose matrices keep their types: the network's numbers, what is written, and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import monge
from monge.core.errors import ModelLoadError, OptionError
from monge.loading import networks
from monge.loading.gguf_files import converted
from monge.loading.named_models import PANELS_FILE
from monge.loading.networks import load_network, prepare
from monge.loading.sources import ModelSource
from monge.networks.network_facts import packed_layers
from tests.api.test_gguf import TEMPLATE, WORDS, write
from tests.engine.compiling import require
from tests.engine.test_gguf_blocks import random_rows

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 256, 2, 1, 512, 2
# As `transformers` takes heads of Qwen3 to be: 128 wide.
BACKEND = "compiled(weights='file')"


def write_mixed(path: Path, architecture: str, *, is_tied: bool, last: str = "Q6_K") -> Path:
    """A tiny network of mixed types, as files of 4 bits are mixed."""
    writer, draws = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    for name, value in {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FEED,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "key_length": HIDDEN // HEADS,
        "value_length": HIDDEN // HEADS,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(WORDS),
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 4 + [1] * (len(WORDS) - 4))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, kind: str, *shape: int) -> None:
        if kind == "F32":
            writer.add_tensor(name, 1 + 0.1 * draws.normal(size=shape).astype(np.float32))
            return
        if kind == "F16":
            writer.add_tensor(name, (0.1 * draws.normal(size=shape)).astype(np.float16))
            return
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        largest = {"Q4_K": 1e-4, "Q6_K": 3e-5, "Q5_0": 3e-3, "Q8_0": 5e-4, "IQ2_XXS": 1e-4}[kind]
        if kind == "IQ2_XXS":
            raw = draws.integers(0, 60, (shape[0], shape[1] // 256 * 66), dtype=np.uint8)
        else:
            rows = random_rows(kind, shape[0], shape[1] // size, seed=len(name), largest=largest)
            raw = rows.numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", "Q6_K" if is_tied else "F16", len(WORDS), HIDDEN)
    add("output_norm.weight", "F32", HIDDEN)
    if not is_tied:
        add("output.weight", "Q8_0", len(WORDS), HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for name, kind, *shape in (
            ("attn_q", "Q4_K", HIDDEN, HIDDEN),
            ("attn_k", "Q4_K", kv, HIDDEN),
            ("attn_v", "Q6_K", kv, HIDDEN),
            ("attn_output", "Q5_0" if is_tied else "F16", HIDDEN, HIDDEN),
            ("ffn_gate", "Q4_K", FEED, HIDDEN),
            ("ffn_up", "Q8_0", FEED, HIDDEN),
            ("ffn_down", last, HIDDEN, FEED),
            ("attn_norm", "F32", HIDDEN),
            ("ffn_norm", "F32", HIDDEN),
        ):
            add(f"blk.{layer}.{name}.weight", kind, *shape)
        if architecture in {"qwen3", "gemma3"}:
            add(f"blk.{layer}.attn_q_norm.weight", "F32", HIDDEN // HEADS)
            add(f"blk.{layer}.attn_k_norm.weight", "F32", HIDDEN // HEADS)
        if architecture == "gemma3":
            add(f"blk.{layer}.post_attention_norm.weight", "F32", HIDDEN)
            add(f"blk.{layer}.post_ffw_norm.weight", "F32", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    require("compiled")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONGE_CACHE", str(folder))
        yield folder


@pytest.mark.parametrize(
    ("architecture", "is_tied"),
    [("llama", False), ("llama", True), ("qwen3", True), ("gemma3", True)],
)
def test_a_network_has_the_numbers_that_the_host_dequantises(
    cache, tmp_path, architecture, is_tied
):
    path = write_mixed(tmp_path / f"{architecture}.gguf", architecture, is_tied=is_tied)
    folder = Path(prepare(ModelSource.of(path), BACKEND).place)
    assert {file.suffix for file in folder.glob("*.safetensors")} == {".safetensors"}
    assert (folder / PANELS_FILE).stat().st_size < 1.6 * path.stat().st_size
    ours = load_network(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    own = dict(ours.named_modules())
    for name, weights in theirs.state_dict().items():
        found = own[name.rpartition(".")[0]].weight
        assert torch.equal(found, weights), name
    assert len(packed_layers(ours)) == 7 * LAYERS + 2
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        states = ours.get_input_embeddings()(ids), theirs.get_input_embeddings()(ids)
        logits = ours(ids).logits, theirs(ids).logits
    assert torch.equal(*states)
    assert (logits[0] - logits[1]).pow(2).mean() <= 0.01 * logits[1].pow(2).mean()


def test_it_decodes_and_says_whose_numbers_these_are(cache, tmp_path):
    path = write_mixed(tmp_path / "mixed.gguf", "llama", is_tied=True)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    plain = monge.load(path, drafter="none")
    drafted = monge.load(path, drafter="ngram(min_ngram=1)", backend=BACKEND)
    assert plain.backend == drafted.backend == "compiled, file weights"
    texts = [
        decoder.generate(["ab a", "b", "cab"], **options)[index].token_ids
        for decoder in (plain, drafted)
        for index in range(3)
    ]
    assert texts[:3] == texts[3:]


@pytest.mark.parametrize(
    "options", [{"backend": "eager"}, {"dtype": "bfloat16"}, {"attention": "eager"}, {}]
)
def test_it_runs_eagerly_where_asked_or_where_nothing_compiles(
    cache, tmp_path, monkeypatch, caplog, options
):
    path = write_mixed(tmp_path / "mixed.gguf", "llama", is_tied=True)
    caplog.set_level("INFO", "monge")
    if not options:
        monkeypatch.setattr(networks, "why_no_compiler", lambda: "there is no compiler")
    assert monge.load(path, drafter="none", **options).backend == "eager"
    assert ("many times slower" in caplog.text) == (not options)


@pytest.mark.parametrize("backend", ["eager", BACKEND])
def test_too_little_memory_is_told_before_weights_are_read(cache, tmp_path, monkeypatch, backend):
    path = write_mixed(tmp_path / "large.gguf", "llama", is_tied=True)
    source = prepare(ModelSource.of(path), backend)
    monkeypatch.setattr(networks, "free_memory", lambda: 500_000)
    with pytest.warns(UserWarning, match=r"weights of large.* GB, and 0.0 GB of memory are free"):
        load_network(source)


def test_an_embedding_is_traced_for_any_number_of_tokens(cache, tmp_path):
    path = write_mixed(tmp_path / "traced.gguf", "gemma3", is_tied=True)
    embedding = load_network(prepare(ModelSource.of(path), BACKEND)).get_input_embeddings()
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.inference_mode():
        traced = torch.export.export(
            embedding, (torch.arange(6).view(2, 3),), dynamic_shapes=(sizes,)
        ).module()
        for tokens in (torch.arange(12).view(3, 4), torch.tensor([[5]])):
            assert torch.equal(traced(tokens), embedding(tokens))


def test_a_type_without_panels_is_dequantised_and_named(cache, tmp_path):
    path = write_mixed(tmp_path / "strange.gguf", "llama", is_tied=False, last="IQ2_XXS")
    with pytest.warns(UserWarning, match=r"strange.gguf is dequantised.*ffn_down.*type IQ2_XXS"):
        folder = converted(path, file_weights=True)
    assert not packed_layers(load_network(folder))


def test_what_does_not_fit_is_refused(cache, tmp_path):
    path = write(tmp_path / "one.gguf")
    with pytest.raises(OptionError, match="weights='file' keeps the types of a GGUF file"):
        monge.load(backend=BACKEND)
    with pytest.raises(OptionError, match="dtype='bfloat16': weights='file' computes in float32"):
        monge.load(path, backend=BACKEND, dtype="bfloat16")
    for data, message in (
        (b"hello", "is no GGUF file: it starts with b'hell'"),
        (path.read_bytes()[:-5000], "it may be truncated"),
    ):
        (bad := tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ModelLoadError, match=message):
            monge.load(bad, backend=BACKEND)


@pytest.mark.parametrize("damaged", [PANELS_FILE, "config.json", None])
@pytest.mark.parametrize("packs", [True, False])
def test_a_converted_file_that_cannot_be_read_is_written_again(
    cache, tmp_path, caplog, damaged, packs
):
    path = write(tmp_path / f"{damaged}-{packs}.gguf")
    folder = converted(path, file_weights=packs)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    name = damaged if damaged in whole else next(one for one in whole if "safetensors" in one)
    if damaged is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[name][:-100])
    caplog.set_level("INFO", "monge")
    assert converted(path, file_weights=packs) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert caplog.text.count("is removed and written again") == 1
    caplog.clear()
    converted(path, file_weights=packs)
    assert caplog.text == ""
