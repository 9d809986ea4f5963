"""Tokens of every `tokenizer.ggml.pre`, beside a recording of llama.cpp's."""

import json
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from lab.tokens import digest, ours, write

RECORD = json.loads((Path(__file__).parent / "llama_cpp_tokens.json").read_text())


@pytest.mark.parametrize("name", sorted(RECORD))
def test_texts_are_split_as_the_name_says(tmp_path, name):
    """`other` are places where that version of llama.cpp departs from the expression."""
    ids = ours(write(tmp_path / "tokens.gguf", name))
    assert digest(ids, RECORD[name]["other"]) == RECORD[name]["digest"]
