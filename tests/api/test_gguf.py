"""GGUF files as targets and drafts: converted once and exactly, with tokenizer and ends of text."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import monge
from monge.core.errors import ModelLoadError
from monge.loading import gguf_files
from monge.loading.gguf_files import converted
from monge.loading.named_models import NAMED, PackagedModel
from monge.loading.networks import load_network, load_tokenizer

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, FEED, LAYERS = 32, 4, 64, 2
WORDS = ["<unk>", "<s>", "</s>", "<|end|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "Ġa"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(
    path: Path,
    *,
    architecture: str = "llama",
    words: list[str] | None = WORDS,
    template: str = TEMPLATE,
    add_bos: bool | None = None,
    model: str = "gpt2",
    pre: str = "smollm",
    unk: int | None = None,
    bos: int = 1,
    eos: int = 2,
    eot: int | None = 3,
) -> Path:
    """A tiny network with half of its weights exact in bfloat16."""
    writer, draws = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    for name, value in {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FEED,
        "head_count": HEADS,
        "head_count_kv": HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": HIDDEN // HEADS,
        "vocab_size": len(WORDS),
    }.items():
        getattr(writer, f"add_{name}")(value)
    if words is not None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(words)
        writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
        writer.add_token_merges(["a b", "Ġ a"])
        for name, token in {"bos": bos, "eos": eos, "eot": eot, "unk": unk}.items():
            if token is not None:
                getattr(writer, f"add_{name}_token_id")(token)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        writer.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        values = torch.from_numpy(draws.normal(size=shape).astype(np.float32))
        writer.add_tensor(
            name, values.bfloat16().float().numpy() if "attn" in name else values.numpy()
        )

    add("token_embd.weight", len(WORDS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(WORDS), HIDDEN)
    square, gate = (HIDDEN, HIDDEN), (FEED, HIDDEN)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    shapes |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_down": (HIDDEN, FEED)}
    for layer in range(LAYERS):
        for name, shape in (shapes | {"ffn_gate": gate, "ffn_up": gate}).items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONGE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def path(cache):
    return write(cache / "tiny.gguf")


def test_weights_are_those_of_the_file_in_the_narrowest_exact_type(path, monkeypatch):
    folder = converted(path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  it is no mapping
    assert {kind for name, kind in kinds.items() if "self_attn" in name} == {"BF16"}
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {"F32"}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    monkeypatch.setattr(gguf_files, "_write", None)  # the second start reads what the first wrote
    ours = load_network(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    assert ours.dtype == torch.float32
    for name, weights in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weights), name


def test_it_decodes_as_target_and_as_draft(path):
    plain = monge.load(path, drafter="none", backend="eager")
    drafted = monge.load(str(path), str(path), tree="chain(3)", controller="fixed", backend="eager")
    (one,), (other,) = (each.generate("ab a", max_new_tokens=12) for each in (plain, drafted))
    assert one.token_ids == other.token_ids
    assert other.stats.block_efficiency > 1.5
    assert plain.eos_ids == {2, 3}, "the end of a turn ends a text"


CLOSED = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "add_bos", "first"),
    [
        (CLOSED, True, [1]),
        (CLOSED, False, []),
        (CLOSED, None, []),
        ("{{ bos_token }}" + CLOSED, True, [1]),
        ("<s>" + CLOSED, True, [1]),
        ("{{ raise_exception('no') }}", True, None),
    ],
)
def test_a_chat_starts_as_the_file_asks(cache, tmp_path, template, add_bos, first):
    path = write(tmp_path / "chat.gguf", template=template, add_bos=add_bos, eot=None)
    decoder = monge.load(path, drafter="none", backend="eager")
    assert 1 not in decoder.tokenizer("ab", add_special_tokens=False)["input_ids"]
    if first is None:
        with pytest.raises(monge.OptionError, match="refuses this conversation: no"):
            decoder.encode_chat([{"role": "user", "content": "ab"}])
        return
    ids = decoder.encode_chat([{"role": "user", "content": "ab"}])
    assert ids == (*first, WORDS.index("ab"), WORDS.index("<|end|>"))
    assert decoder.eos_ids == {2, 3}, "the template's end of a turn ends a text"
    plain = decoder.encode("ab")
    assert plain == ((1,) if add_bos else ()) + (WORDS.index("ab"),)


def test_the_host_reads_the_tokenizer_in_one_pass(cache, path, monkeypatch):
    """Of a vocabulary of 262,144 tokens, a pass in Python takes seconds and 130 MB."""
    converted(path)
    parsed = []
    monkeypatch.setattr(
        json, "load", lambda file: parsed.append(file.name) or json.loads(file.read())
    )
    load_tokenizer(path)
    assert not [name for name in parsed if name.endswith("tokenizer.json")]


def test_a_file_is_named_by_its_header_and_by_every_tensor(path, tmp_path):
    reader = gguf.GGUFReader(path)
    (changed := tmp_path / "changed.gguf").write_bytes(contents := path.read_bytes())
    names = {gguf_files._digest(changed)}
    template = contents.index(TEMPLATE.encode())
    places = [template, *(int(tensor.data_offset) for tensor in reader.tensors)]
    for place in places:
        changed.write_bytes(contents[:place] + b"#" + contents[place + 1 :])
        names.add(gguf_files._digest(changed))
    assert len(names) == 1 + len(places)


def test_what_cannot_be_read_is_refused_by_name(cache, path, tmp_path):
    with pytest.raises(ModelLoadError, match="no file .*missing.gguf"):
        monge.load(tmp_path / "missing.gguf")
    for data, message in (
        (b"hello", "is no GGUF file: it starts with b'hell'"),
        (path.read_bytes()[:-5000], "it may be truncated"),
        (path.read_bytes()[:300], "it may be truncated"),
    ):
        (bad := tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(ModelLoadError, match=message):
            monge.load(bad)
    strange = write(tmp_path / "strange.gguf", architecture="mystery")
    with pytest.raises(ModelLoadError, match=r"transformers cannot read strange.gguf.*mystery"):
        monge.load(strange)
    bare = write(tmp_path / "bare.gguf", words=None)
    with pytest.raises(ModelLoadError, match="tokenizer of .* could not be built"):
        monge.load(bare)
    assert load_network(bare).dtype == torch.float32, "the weights are there"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "mystery"}, "pre = mystery is unknown: nothing says how texts are split"),
        ({"model": "bert"}, "model = bert, and known are gemma4, gpt2, llama"),
        ({"model": "t5"}, "model = t5, and known are gemma4, gpt2, llama"),
        ({"bos": 99}, "bos_token_id = 99, and there are 33 tokens"),
        ({"eos": 33}, "eos_token_id = 33, and there are 33 tokens"),
        ({"eot": 99}, "eot_token_id = 99, and there are 33 tokens"),
        ({"unk": 99}, "unknown_token_id = 99, and there are 33 tokens"),
        ({"words": [*WORDS, "zz"]}, "34 tokens, and the network has 33"),
        ({"words": [*WORDS[:-1], "ab"]}, "token 'ab' has two ids, 31 and 32"),
    ],
)
def test_a_tokenizer_that_is_not_described_is_refused(cache, tmp_path, changes, reason):
    refused = write(tmp_path / "refused.gguf", **changes)
    with pytest.raises(ModelLoadError) as refusal:
        monge.load(refused, drafter="none", backend="eager")
    assert reason in str(refusal.value)
    assert "give the folder of one: tokenizer=... (--tokenizer)" in str(refusal.value)


@pytest.mark.parametrize("pre", ["smollm", "mystery"])
def test_the_tokenizer_of_a_folder_takes_the_place_of_the_files(cache, path, tmp_path, run, pre):
    folder = tmp_path / "folder"
    given = load_tokenizer(path)
    given.chat_template = "b{{ messages[0].content }}"
    given.add_tokens(["z ab"])  # which the vocabulary of the file does not have
    given.save_pretrained(folder)
    file = write(tmp_path / "file.gguf", pre=pre)
    decoder = monge.load(file, tokenizer=folder, drafter="none", backend="eager")
    assert decoder.encode("ab a") == tuple(given("ab a")["input_ids"])
    with pytest.raises(monge.OptionError, match=r"must lie in 0\.\.32; got 33"):
        decoder.generate("z ab", max_new_tokens=1)
    assert decoder.encode_chat([{"role": "user", "content": "c"}]) == tuple(
        given("bc")["input_ids"]
    )
    (expected,) = decoder.generate("ab a", max_new_tokens=3)
    options = ["--drafter", "none", "--backend", "eager", "--max-new-tokens", 3, "--json"]
    done = run("generate", "ab a", "--target", file, "--tokenizer", folder, *options)
    record = json.loads(done.stdout)
    assert (record["token_ids"], record["text"]) == (list(expected.token_ids), expected.text)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch, cache):
    other = write(tmp_path / "other.gguf", words=[*WORDS[:-1], "Ġb"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ModelLoadError, match="make room, or set MONGE_CACHE"):
        monge.load(other)
    assert not list((cache / "gguf").glob("other*"))
    assert not list((cache / "gguf").glob(".writing*"))


def test_a_package_that_is_missing_or_empty(monkeypatch):
    monkeypatch.setitem(NAMED, "none such", PackagedModel("no-such-package", "pip install it"))
    with pytest.raises(ModelLoadError, match="is not installed; run: pip install it"):
        monge.load("none such")
    monkeypatch.setitem(NAMED, "no file", PackagedModel("pytest", "pip install pytest"))
    with pytest.raises(ModelLoadError, match="has no GGUF file; install it again"):
        monge.load("no file")
