"""Bad input: an error that says what, where, got, expected and what to do."""

import json
import math
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from monge.api import built_in, load, make_components
from monge.core.errors import (
    ContextLengthError,
    ModelLoadError,
    OptionError,
    ProposalMismatchError,
    VocabularyMismatchError,
)
from monge.draft.ngram import NgramDrafter
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5


def decoder(max_length: int | None = None, **parts: object) -> Decoder:
    target = TabularModel(RandomTable(VOCAB, 1), VOCAB, max_length)
    draft = TabularModel(RandomTable(VOCAB, 2), VOCAB)
    return Decoder(make_components(target, draft, **parts))  # type: ignore[arg-type]


def tiny(vocab_size: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def test_empty_prompt():
    with pytest.raises(OptionError, match="the prompt is empty"):
        decoder().generate([[]])
    with pytest.raises(OptionError, match="no prompts were given"):
        decoder().generate([])


def test_half_a_character_is_no_text():
    with pytest.raises(
        OptionError,
        match=r"prompt: character 1 is '\\ud800', half of a pair of "
        r"surrogates",
    ):
        load(controller="fixed").generate("a\ud800", max_new_tokens=1)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    assert (
        decoder().generate([[0, 1]], max_new_tokens=1, seed=seed, temperature=1.0)[0].seed == seed
    )


def test_text_without_a_tokenizer():
    with pytest.raises(OptionError, match="no tokenizer: give token ids"):
        decoder().generate("hello")


@pytest.mark.parametrize(
    ("stop", "complaint"),
    [
        (["a", "b\ud83d"], r"stop\[1\]: character 1 is .*half of a pair of surrogates"),
        ([""], "a stop string is empty"),
    ],
)
def test_stop_strings_that_are_no_text(stop, complaint):
    with pytest.raises(OptionError, match=complaint):
        decoder().generate([[0, 1]], stop=stop)


def test_tokens_outside_the_vocabulary():
    with pytest.raises(OptionError, match=r"0\.\.4; got 9"):
        decoder().generate([[1, 9]])


def test_prompt_and_completion_beyond_the_context():
    with pytest.raises(
        ContextLengthError,
        match="prompt of 3 tokens.*max_new_tokens=8 = 11 exceeds the target's context of 10",
    ):
        decoder(max_length=10).generate([[0, 1, 2]], max_new_tokens=8)


def test_a_draft_deeper_than_the_context():
    with pytest.raises(
        OptionError, match="draft depth 12 does not fit the target's context of 10 tokens"
    ):
        decoder(max_length=10, tree="chain(12)", verifier="single_draft")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"verifier": "rss"}, "unknown verifier 'rss'; did you mean 'rrs'"),
        ({"drafter": "n-gram"}, "cannot read drafter 'n-gram'|unknown drafter"),
        ({"drafter": "ngrams"}, "unknown drafter 'ngrams'; did you mean 'ngram'"),
        ({"tree": "chian"}, "unknown tree 'chian'; did you mean 'chain'"),
        ({"tree": "chain(dept=3)"}, "unknown option of tree 'chain': 'dept'; did you mean 'depth'"),
        ({"tree": "chain(1, 'iid', 3)"}, "takes at most 2 settings; got 3"),
        ({"tree": "chain(__import__('os'))"}, "cannot read tree"),
        ({"tree": "chain(0)"}, "chain: depth must be at least 1; got 0"),
        ({"tree": "fixed_width((2, 0))"}, r"widths\[1\] must be at least 1; got 0"),
        ({"tree": "chain(2, 'idd')"}, "unknown way of drawing children 'idd'; did you mean 'iid'"),
        ({"controller": "fixd"}, "unknown controller 'fixd'; did you mean 'fixed'"),
        ({"drafter": "ngram", "tree": "chain"}, "drafter 'ngram' takes no"),
        ({"drafter": "none", "draft_temperature": 0.5}, "drafter 'none' takes no"),
        ({"drafter": NgramDrafter(), "tree": "chain"}, "brings its own tree"),
    ],
)
def test_names_and_settings(parts, message):
    with pytest.raises(OptionError, match=message):
        decoder(**parts)


def test_a_model_drafter_without_a_model():
    with pytest.raises(OptionError, match="drafter 'model' needs a draft model"):
        make_components(TabularModel(RandomTable(VOCAB, 1), VOCAB), drafter="model")


def test_illegal_pairs_name_the_legal_verifiers():
    with pytest.raises(
        ProposalMismatchError,
        match="Rrs is exact for .*WithoutReplacement; legal here: target_walk, rrs_without",
    ):
        decoder(tree="fixed_width((2,), 'without_replacement')", verifier="rrs")
    with pytest.raises(ProposalMismatchError, match="at most 1 candidate.*up to 2 are offered"):
        decoder(tree="fixed_width((2,), 'iid')", verifier="single_draft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and >= 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        (
            {"seed": 2**64},
            "seed must be a whole number of at least -2.63 and less than 2.64; got "
            "18446744073709551616",
        ),
        ({"seed": -(2**63) - 1}, "seed must be a whole number"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
    ],
)
def test_options(options, message):
    with pytest.raises(OptionError, match=message):
        decoder().generate([[0, 1]], **options)


def test_unknown_options_are_not_ignored():
    with pytest.raises(OptionError, match="temprature"):
        decoder().generate([[0, 1]], temprature=0.5)


def test_missing_and_broken_checkpoints(tmp_path):
    with pytest.raises(ModelLoadError, match="no folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(
        ModelLoadError,
        match=r"file\.txt' is a file; give the folder of a "
        r"checkpoint",
    ):
        load(tmp_path / "file.txt")
    with pytest.raises(
        ModelLoadError,
        match=r"file\.txt' has no config\.json beside it; give the "
        r"folder",
    ):
        load(draft=tmp_path / "file.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load(tmp_path / "empty")
    shutil.copytree(built_in("draft"), tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"cannot load a model from .*broken"):
        load(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="cannot load a model"):
        load(tmp_path / "broken")


@pytest.mark.parametrize(
    ("loading", "message"),
    [
        ({"dtype": "float99"}, "unknown dtype 'float99'; did you mean 'float64'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "foo"}, "device 'foo' cannot be used: "),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used: "),
    ],
)
def test_types_and_devices_that_are_not_there(loading, message):
    with pytest.raises(OptionError, match=message):
        load(**loading)


def test_vocabulary_of_another_size():
    with pytest.raises(
        VocabularyMismatchError, match="the draft model has 48 tokens, the target 64"
    ):
        load(tiny(64), tiny(48))


def test_another_tokenizer(tmp_path):
    folder = shutil.copytree(built_in("draft"), tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyMismatchError, match="2 of 4096 tokens differ"):
        load(draft=folder, target=built_in("target"))


class Poisoned(TabularModel):
    """NaN for texts that contain a given token."""

    def extend(self, blocks):
        logits = dict(super().extend(blocks))
        for sequence in blocks:
            if 4 in self._committed[sequence]:
                logits[sequence] = torch.full_like(logits[sequence], math.nan)
        return logits


def test_nan_logits_stop_that_request_and_no_other():
    prompts = [[0, 1], [4, 1], [2, 1]]
    healthy = Decoder(
        make_components(
            TabularModel(RandomTable(VOCAB, 1), VOCAB), TabularModel(RandomTable(VOCAB, 2), VOCAB)
        )
    )
    poisoned = Decoder(
        make_components(
            Poisoned(RandomTable(VOCAB, 1), VOCAB), TabularModel(RandomTable(VOCAB, 2), VOCAB)
        )
    )
    expected = healthy.generate(
        prompts, max_new_tokens=3, seed=1, temperature=1.0, processors=[no_four]
    )
    results = poisoned.generate(
        prompts, max_new_tokens=3, seed=1, temperature=1.0, processors=[no_four]
    )
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert "not finite" in str(results[1].error)
    assert results[0].token_ids == expected[0].token_ids
    assert results[2].token_ids == expected[2].token_ids


def no_four(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    scores[:, 4] = torch.where(scores[:, 4].isnan(), scores[:, 4], -math.inf)
    return scores


def test_a_draft_model_with_nan_logits_drafts_nothing():
    parts = make_components(
        TabularModel(RandomTable(VOCAB, 1), VOCAB), Poisoned(RandomTable(VOCAB, 2), VOCAB)
    )
    with pytest.warns(UserWarning, match="draft model, request 0: .*drafting stops here"):
        (result,) = Decoder(parts).generate([[4, 1]], max_new_tokens=4, seed=1, temperature=1.0)
    assert result.finish_reason == "length"
    assert result.stats.block_efficiency == 1.0
