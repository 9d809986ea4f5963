"""The processors of xgrammar, llguidance and outlines: sampled texts keep to the grammar, greedy ones are the host's."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monge
from monge.api import built_in
from monge.loading.networks import load_network

REGEX = r"([a-f]{2}[0-9])*"
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


@pytest.fixture(scope="module")
def parts(built_in_pair) -> tuple[Any, Any, Any]:
    target, tokenizer = built_in_pair
    return target, load_network(built_in("draft")), tokenizer


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """llguidance compiles the four lines that apply a mask, which takes longer than these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def xgrammar(target: Any, tokenizer: Any) -> Callable[[], Any]:
    library = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    info = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    grammar = library.GrammarCompiler(info).compile_regex(REGEX)
    return lambda: LogitsProcessor(grammar)


def through_outlines(backend: str) -> Callable[[Any, Any], Callable[[], Any]]:
    def make(target: Any, tokenizer: Any) -> Callable[[], Any]:
        outlines = pytest.importorskip("outlines")
        pytest.importorskip(backend)
        from outlines import backends

        model = outlines.from_transformers(target, tokenizer)
        return lambda: backends.get_regex_logits_processor(backend, model, REGEX)

    return make


MAKERS = {
    "xgrammar": xgrammar,
    "outlines": through_outlines("outlines_core"),
    "llguidance through outlines": through_outlines("llguidance"),
    "xgrammar through outlines": through_outlines("xgrammar"),
}


@pytest.mark.parametrize("library", MAKERS)
@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((2, 2, 1))"])
def test_sampled_texts_keep_to_the_grammar(parts, library, tree):
    target, draft, tokenizer = parts
    make = MAKERS[library](target, tokenizer)
    inputs = tokenizer("Codes:", return_tensors="pt", return_token_type_ids=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="request .* cannot be copied")
        for rows in (1, 3):
            given = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": rows}
            given |= {"draft": draft, "tree": tree, "logits_processor": [make()]}
            output = monge.generate(target, **inputs, **given)
            written = output[:, inputs["input_ids"].shape[1] :]
            for text in tokenizer.batch_decode(written, skip_special_tokens=True):
                # Cut at the limit, so within the last repetition.
                assert re.fullmatch(r"([a-f]{2}[0-9])*([a-f]{0,2})", text), text


@pytest.mark.parametrize("library", MAKERS)
def test_greedy_text_is_that_of_plain_decoding(parts, library):
    target, draft, tokenizer = parts
    make = MAKERS[library](target, tokenizer)
    inputs = tokenizer(["Codes:", "A list"], return_tensors="pt", padding=True, padding_side="left")
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    given |= {"do_sample": False, "max_new_tokens": 12}
    plain = target.generate(**given, logits_processor=[make()])
    ours = monge.generate(target, **given, draft=draft, logits_processor=[make()])
    assert ours.tolist() == plain.tolist()
