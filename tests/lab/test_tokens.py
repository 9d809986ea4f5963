"""Tokens of every `tokenizer.ggml.pre`, beside a recording of llama.cpp's."""

import json
from pathlib import Path

import pytest
import typer

pytest.importorskip("gguf")

from lab.tokens import CASES, built, departures, digest, main, ours, texts
from monge.loading.gguf_tokenizer import PRE_TOKENIZERS

RECORD = json.loads((Path(__file__).parent / "llama_cpp_tokens.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", RECORD, ids=lambda group: group["names"][0])
def test_tokens_are_those_of_llama_cpp_or_stated(group):
    """`other` holds our tokens where llama.cpp departs from what a model was published with."""
    firsts = {(CASES[name].model, PRE_TOKENIZERS[CASES[name].pre]): name for name in group["names"]}
    for name in firsts.values():
        pairs = list(zip(texts(), ours(name), strict=True))
        assert {text: got for text, got in pairs if text in group["other"]} == group["other"]
        assert digest([got for text, got in pairs if text not in group["other"]]) == group["digest"]


def test_every_departure_has_a_reason():
    departing = {name for group in RECORD if group["other"] for name in group["names"]}
    assert departing == departures().keys()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("granite-embed-multi-97m", "camelCase हिन्दी1234", "camel|Case| हिन्दी|123|4"),
        ("laguna", "it'S \n\n 12", "it|'S| |\n\n| |1|2"),
        ("minicpm5", "it'S 12345\n", "it|'S| |123|45|\n"),
        ("ufakzeka", "İstanbul'da 12\n", "İstanbul|'da| |1|2|\n"),
        ("spark2_5", "a+b 1234;\n\n世界", "a|+b| |1|2|3|4|;|\n|\n|世界"),
        ("sarvam-moe", "a b\n\nc", "a b|\n\n|c"),
        ("granite-embed-multi-311m", "a b\n\nc", "a b|\n\n|c"),
    ],
)
def test_names_that_the_recorded_llama_cpp_does_not_know(name, text, expected):
    """The words follow by hand from the expressions of later versions."""
    found = built(name).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in found) == expected


def test_unexplained_differences_fail(monkeypatch, capsys):
    tokens = ours("smollm")
    monkeypatch.setattr("lab.tokens.theirs", lambda name, python: [[], *tokens[1:]])
    with pytest.raises(typer.Exit):
        main(python=Path("python"), record=None, names=["smollm"])
    assert "the tokens of smollm differ from llama.cpp's" in capsys.readouterr().err
