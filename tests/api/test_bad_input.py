"""Bad input: an error that says what, where, got, expected and what to do."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from monge.api import built_in, load, make_components
from monge.core.errors import (
    ContextLengthError,
    ModelLoadError,
    OptionError,
    ProposalMismatchError,
    VocabularyMismatchError,
)
from monge.draft.ngram import Ngram
from monge.loading.networks import load_tokenizer
from tests.engine.tiny import network
from tests.kit.tables import table, table_decoder


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "the prompt is empty"),
        ([], {}, "no prompts were given"),
        ("hello", {}, "no tokenizer: give token ids"),
        ([[1, 9]], {}, r"0\.\.4; got 9"),
        ([[0]], {"stop": ["a", "b\ud83d"]}, r"stop\[1\]: character 1 is .*half of a pair"),
        ([[0]], {"stop": ["a", ""]}, "a stop string is empty"),
        ([[0]], {"stop": "x"}, "stop strings need a tokenizer"),
        ([[0]], {"temperature": -1.0}, "temperature must be finite and >= 0"),
        ([[0]], {"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ([[0]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ([[0]], {"seed": 2**64}, "whole number of at least -2.63 and less than 2.64; got 1844"),
        ([[0]], {"seed": -(2**63) - 1}, "seed must be a whole number"),
        ([[0]], {"temprature": 0.5}, "temprature"),
    ],
)
def test_requests(prompts, options, message):
    with pytest.raises(OptionError, match=message):
        table_decoder().generate(prompts, **options)


@pytest.mark.parametrize(
    ("loading", "error", "message"),
    [
        ({"dtype": "float99"}, OptionError, "unknown dtype 'float99'; did you mean 'float64'"),
        ({"dtype": "int8"}, OptionError, "unknown dtype 'int8'"),
        ({"device": "foo"}, OptionError, "device 'foo' cannot be used: "),
        ({"device": "cuda:99"}, OptionError, "device 'cuda:99' cannot be used: "),
        (
            {"target": network("llama", vocab_size=64), "draft": network("llama", vocab_size=48)},
            VocabularyMismatchError,
            "the draft model has 48 tokens, the target 64",
        ),
    ],
)
def test_networks_that_cannot_be_loaded(loading, error, message):
    with pytest.raises(error, match=message):
        load(**loading)


def test_half_a_character_is_no_text():
    expected = r"prompt: character 1 is '\\ud800', half of a pair of surrogates"
    with pytest.raises(OptionError, match=expected):
        load(controller="fixed").generate("a\ud800", max_new_tokens=1)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    (result,) = table_decoder().generate([[0, 1]], max_new_tokens=1, seed=seed, temperature=1.0)
    assert result.seed == seed


def test_lengths_beyond_the_context():
    expected = "prompt of 3 tokens.*max_new_tokens=8 = 11 exceeds the target's context length of 10"
    with pytest.raises(ContextLengthError, match=expected):
        table_decoder(max_length=10).generate([[0, 1, 2]], max_new_tokens=8)
    expected = "draft depth 12 does not fit the target's context of 10 tokens"
    with pytest.raises(OptionError, match=expected):
        table_decoder(max_length=10, tree="chain(12)", verifier="speculative_sampling")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"verifier": "blok"}, "unknown verifier 'blok'; did you mean 'block'"),
        ({"drafter": "n-gram"}, "cannot read drafter 'n-gram'|unknown drafter"),
        ({"drafter": "ngrams"}, "unknown drafter 'ngrams'; did you mean 'ngram'"),
        ({"tree": "chian"}, "unknown tree 'chian'; did you mean 'chain'"),
        ({"tree": "chain(dept=3)"}, "unknown option of tree 'chain': 'dept'; did you mean 'depth'"),
        ({"tree": "chain(__import__('os'))"}, "depth must be int, such as 3; got .__import__"),
        ({"tree": "chain(os.name)"}, "cannot read tree"),
        ({"tree": "chain(0)"}, "chain: depth must be at least 1; got 0"),
        ({"tree": "fixed_width((2, 0))"}, r"widths\[1\] must be at least 1; got 0"),
        ({"tree": "chain(2, 'idd')"}, "unknown way of drawing children 'idd'; did you mean 'iid'"),
        ({"controller": "fixd"}, "unknown controller 'fixd'; did you mean 'fixed'"),
        ({"drafter": "ngram", "tree": "chain"}, "drafter 'ngram' takes no"),
        ({"drafter": Ngram(), "tree": "chain"}, "drafter 'ngram' takes no draft model"),
    ],
)
def test_names_and_settings(parts, message):
    with pytest.raises(OptionError, match=message):
        table_decoder(**parts)
    with pytest.raises(OptionError, match="drafter 'model' needs a draft model"):
        make_components(table(), drafter="model")


def test_illegal_pairs_name_the_legal_verifiers():
    with pytest.raises(
        ProposalMismatchError,
        match="RecursiveRejection is exact for .*WithoutReplacement; legal here: sample_and_match, recursive_rejection_without",
    ):
        table_decoder(
            tree="fixed_width((2,), 'without_replacement')", verifier="recursive_rejection"
        )
    with pytest.raises(ProposalMismatchError, match="at most 1 candidate.*up to 2 are offered"):
        table_decoder(tree="fixed_width((2,), 'iid')", verifier="speculative_sampling")


def test_missing_and_broken_checkpoints(tmp_path):
    (file := tmp_path / "file.txt").write_text("")
    (empty := tmp_path / "empty").mkdir()
    for options, message in (
        ({"target": tmp_path / "nowhere"}, "no folder"),
        ({"target": file}, r"file\.txt' is a file; give the folder of a checkpoint"),
        ({"draft": file}, r"file\.txt' has no config\.json beside it; give the folder"),
        ({"target": empty}, r"has no config\.json"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            load(**options)
    broken = shutil.copytree(built_in("draft"), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"cannot load a model from .*broken"):
        load(broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="cannot load a model"):
        load(broken)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "xlm"])
def test_a_folder_without_a_tokenizer(tmp_path, kind):
    """Of some kinds the host makes one of a few special tokens, without a word; of others it asks for packages."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelLoadError, match=f"there is no tokenizer in '{tmp_path}'.*--tokenizer"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_special_tokens_is_one(tmp_path):
    folder = shutil.copytree(built_in("draft"), tmp_path / "special")
    vocabulary = WordLevel({"<a>": 0, "<b>": 1}, unk_token="<b>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(vocabulary), pad_token="<a>"
    ).save_pretrained(folder)
    assert len(load_tokenizer(folder)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_weights_beyond_the_memory_are_told_in_bytes(tmp_path):
    """A file that cannot even be mapped, as under `ulimit -v`."""
    folder = shutil.copytree(built_in("draft"), tmp_path / "large")
    settings = json.loads((folder / "config.json").read_text())
    with (folder / "model.safetensors").open("rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    width, wide, begin = settings["intermediate_size"], 10_000_000, 0
    entries.pop("__metadata__", None)
    for entry in entries.values():
        entry["shape"] = [wide if size == width else size for size in entry["shape"]]
        end = begin + math.prod(entry["shape"]) * (4 if entry["dtype"] == "F32" else 2)
        entry["data_offsets"], begin = [begin, end], end
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + begin)
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": wide}))
    code = f"""
import resource
from monge.loading.networks import load_network
resource.setrlimit(resource.RLIMIT_AS, (6 * 10**9, resource.RLIM_INFINITY))
load_network({str(folder)!r})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = ran.stderr.splitlines()[-1]
    pattern = rf"not enough memory for '{folder}': its weights take {begin / 1e9:.1f} GB, and "
    assert re.search(pattern + r"[0-5]\.\d GB are free", last), last


def test_another_tokenizer(tmp_path):
    folder = shutil.copytree(built_in("draft"), tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyMismatchError, match="2 of 4096 tokens differ"):
        load(draft=folder, target=built_in("target"))
