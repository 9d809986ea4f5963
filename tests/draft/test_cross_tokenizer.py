"""Draft models with another tokenizer: declared laws, exact text, strings, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from monge.api import load, make_components
from monge.core.errors import (
    ContextLengthError,
    OptionError,
    VocabularyMismatchError,
)
from monge.core.sampling_rules import SamplingRules
from monge.draft.retokenize import Retokenize
from monge.laws.from_logits import law_from_logits
from monge.networks.base import ForeignModel, NodeBlock
from monge.networks.cross_tokenizer import CrossTokenizerModel, map_vocabulary, spellings
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel


def byte_level(pieces: list[str], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    words = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=words, merges=merges))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>" if "<end>" in words else None
    )


# The target's tokens: a, b, ab. The draft model's: <end>, b, a, ba: "a" and "b" are shared, "ab" is
# two of its tokens.
THEIRS = (["a", "b", "ab"], [("a", "b")])
OURS = (["<end>", "b", "a", "ba"], [("b", "a")])


def foreign(draft: TabularModel | None = None) -> CrossTokenizerModel:
    target_tokenizer, own_tokenizer = byte_level(*THEIRS), byte_level(*OURS)
    words = map_vocabulary(target_tokenizer, own_tokenizer, 3, 4)
    return CrossTokenizerModel(
        draft or TabularModel(RandomTable(4, 23), 4), words, own_tokenizer, target_tokenizer
    )


def target() -> TabularModel:
    return TabularModel(RandomTable(3, 11), 3)


def test_words_are_spelled_in_the_other_vocabulary() -> None:
    words = map_vocabulary(byte_level(*THEIRS), byte_level(*OURS), 3, 4)
    assert words.shared == ((0, 2), (1, 1))
    assert words.written == ((2,), (1,), (2, 1))
    assert words.read((2, 0)) == (2, 1, 2)


def test_the_declared_law_is_the_draft_law_given_that_the_token_is_shared() -> None:
    model, own = foreign(), TabularModel(RandomTable(4, 23), 4)
    model.open({0: (0,)})
    # "ab", and below it "b" and "a"
    logits = model.extend({0: NodeBlock((2, 1, 0), (-1, 0, 0))})[0]
    for row, text in enumerate([(2, 2, 1), (2, 2, 1, 1), (2, 2, 1, 2)]):
        masses = own.table(text)
        shared = masses[1] + masses[2]
        law = law_from_logits(logits[row], SamplingRules())
        assert law.prob(0) == pytest.approx(masses[2] / shared, abs=1e-15)
        assert law.prob(1) == pytest.approx(masses[1] / shared, abs=1e-15)
        assert law.prob(2) == 0.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": "model", "tree": "chain(2)", "verifier": "speculative_sampling"},
        {"drafter": "model", "tree": "fixed_width((2,), 'iid')", "verifier": "recursive_rejection"},
        {"drafter": "model", "tree": "best_first(3, 2, 2)", "verifier": "sample_and_match"},
        {"drafter": "retokenize(num_own_tokens=2)"},
        {"drafter": "pool('ngram(2)', 'retokenize', min_nodes=2)"},
    ],
)
def test_lossless(parts: dict[str, str], temperature: float) -> None:
    """Alone, and beside another request."""
    rules = SamplingRules(temperature=temperature)
    beside = {"neighbours": ((0, 2, 2),), "slot": 1, "rules": rules}
    for case in (
        Case(prompt=(0, 2, 0), horizon=2, max_new_tokens=3, rules=rules),
        Case(prompt=(2, 1), horizon=2, max_new_tokens=2, **beside),
    ):
        found = output_law(lambda: make_components(target(), foreign(), **parts), case)
        assert law_error(found, target_law(target(), case)) < 1e-12


def test_the_cache_follows_the_text_in_its_own_tokens() -> None:
    own = TabularModel(RandomTable(4, 23), 4)
    model = foreign(own)
    model.open({0: (2,), 1: ()})
    model.append({0: (0,)})
    assert own.text(0) == (2, 1, 2)
    model.extend({0: NodeBlock((2, 2, 1), (-1, 0, 0))})
    model.extend({0: NodeBlock((0,), (1,))})
    model.commit({0: (0, 1, 3)})
    assert own.text(0) == (2, 1, 2, 2, 1, 2, 1, 2)
    assert (model.length(0), model.length(1)) == (5, 0)
    model.close(0)
    assert isinstance(model, ForeignModel)


def test_a_continuation_is_the_greedy_text_in_the_targets_tokens() -> None:
    class Script:
        def __call__(self, text: tuple[int, ...]) -> list[float]:
            following = (2, 1, 3)[len(text) % 3]  # after three tokens "a", then "b", then "ba"
            return [float(token == following) for token in range(4)]

    own = TabularModel(Script(), 4)
    model = foreign(own)
    model.open({0: (1, 1)})
    model.extend({0: NodeBlock.chain((1,))})
    model.commit({0: (0,)})
    assert model.continuations({0: 3})[0] == (2, 1, 0)  # a b ba -> "abba" -> ab b a
    assert own.text(0) == (1, 1, 1)
    assert model.continuations({}) == {}


def test_strings_need_a_foreign_model_and_sizes() -> None:
    refusal = "for a draft model with another tokenizer, loaded with cross_tokenizer=True"
    with pytest.raises(OptionError, match=refusal):
        make_components(target(), target(), drafter="retokenize")
    with pytest.raises(OptionError, match="retokenize: num_own_tokens must be at least 1; got 0"):
        Retokenize(model=foreign(), num_own_tokens=0)


def test_a_text_too_long_for_the_draft_model_says_so() -> None:
    model = foreign(TabularModel(RandomTable(4, 23), 4, max_length=4))
    model.open({0: (2, 2)})
    refusal = "2 tokens are 5 of the draft model's, which reads 4"
    assert (model.reach(0, (2, 2)), model.reach(0, (2, 2, 0)), foreign().reach(0, ())) == (
        2,
        2,
        None,
    )
    with pytest.raises(ContextLengthError, match=refusal):
        model.extend({0: NodeBlock((0,), (-1,))})


def test_a_text_that_does_not_fit_is_not_read() -> None:
    model = foreign(TabularModel(RandomTable(4, 23), 4, max_length=4))
    model.open({0: (2, 2, 2), 1: (2,)})
    model.append({0: (2, 2, 2), 1: (0, 2)})
    assert (model.length(0), model.length(1)) == (0, 1)
    assert (model.reach(0, (2, 2, 2)), model.reach(1, (2,))) == (1, 3)
    assert (model.reach(1, (2,), mixed=True), model.reach(1, (2, 0, 0), mixed=True)) == (2, 3)


def sentence_piece(pieces: list[str]) -> PreTrainedTokenizerFast:
    made = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False)
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_kinds_of_tokenizers_are_compared_by_bytes() -> None:
    words = ["\N{LOWER ONE EIGHTH BLOCK}a", "b", "<0x41>", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    pieces = sentence_piece(["<unk>", *words])
    spelt = dict(enumerate((b"", b" a", b"b", b"A", b"\xc3\xa9")))
    assert spellings(pieces, "target") | {0: b""} == spelt
    signs = byte_level(["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}a", "b", "A"], [])
    assert map_vocabulary(pieces, signs, 5, 3).shared == ((1, 0), (2, 1), (3, 2))
    # No byte of the letter is known: any token does.
    assert map_vocabulary(pieces, signs, 6, 3).written[4:] == ((0,), (0,))


def test_vocabularies_that_do_not_meet_are_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"share no token \(2 and 1 are known\)"):
        map_vocabulary(byte_level(["a", "b"], []), byte_level(["c"], []), 2, 1)
    slow: Any = object()
    refusal = r"the draft model's tokenizer \(object\) does not say how its tokens"
    with pytest.raises(VocabularyMismatchError, match=refusal):
        map_vocabulary(byte_level(["a"], []), slow, 1, 1)
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    refusal = "neither byte-level nor of SentencePiece's kind"
    with pytest.raises(VocabularyMismatchError, match=refusal):
        spellings(words, "target")


def save(folder: Path, pieces: list[str], merges: list[tuple[str, str]], seed: int) -> str:
    sizes: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of a network, not of a draw
        LlamaForCausalLM(LlamaConfig(vocab_size=len(pieces), **sizes)).save_pretrained(folder)
    byte_level(pieces, merges).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("drafter", ["model", "retokenize"])
def test_from_folders(tmp_path: Path, drafter: str) -> None:
    """As a user does it: refused unless asked for, then the plain greedy text."""
    names = save(tmp_path / "target", *THEIRS, seed=1), save(tmp_path / "draft", *OURS, seed=2)
    with pytest.raises(VocabularyMismatchError, match="or be loaded with cross_tokenizer=True"):
        load(*names, drafter="model")
    plain = load(names[0], drafter="none").generate("abba", max_new_tokens=12, ignore_eos=True)
    drafted = load(*names, drafter=drafter, cross_tokenizer=True, controller="fixed").generate(
        "abba", max_new_tokens=12, ignore_eos=True
    )
    assert drafted[0].token_ids == plain[0].token_ids
    assert sum(record.num_nodes for record in drafted[0].records) > 0


def test_loaded_networks_bring_no_tokenizer(tmp_path: Path) -> None:
    names = save(tmp_path / "target", *THEIRS, seed=1), save(tmp_path / "draft", *OURS, seed=2)
    network = LlamaForCausalLM.from_pretrained(names[1])
    with pytest.raises(VocabularyMismatchError, match="cross_tokenizer needs both tokenizers"):
        load(names[0], network, cross_tokenizer=True)
