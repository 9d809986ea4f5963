"""Models that `lab.pair.train` starts from nothing, and the prompts of `lab.pair.mixed_prompts`."""

import argparse
import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from lab.pair.train import new_model
from monge.api import built_in
from monge.prompts import read_prompts


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_new_models_have_the_targets_vocabulary_and_the_given_sizes(family):
    config = AutoConfig.from_pretrained(built_in("target"))
    sizes = argparse.Namespace(layers=1, hidden=64, intermediate=32, seed=3)
    first, second = (new_model(config, family, sizes) for _ in range(2))
    own = first.config
    assert own.model_type == family
    assert (own.num_hidden_layers, own.hidden_size, own.intermediate_size) == (1, 64, 32)
    assert (own.vocab_size, own.eos_token_id) == (config.vocab_size, config.eos_token_id)
    assert first(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, config.vocab_size)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def published_prompts(folder: Path) -> None:
    kinds = ("math", "translation", "summarization")
    files = {
        "gsm8k_test.jsonl": [{"question": f"How many are {n} and 2?"} for n in range(3)],
        "humaneval.jsonl.gz": [{"prompt": f"def one_{n}():"} for n in range(3)],
        "mt_bench_question.jsonl": [{"turns": [f"Add {n}.", "Again."]} for n in range(3)],
        "spec_bench_question.jsonl": [
            {"category": kind, "turns": [f"{kind} {'long ' * (30 * n)}{n}"]}
            for n in range(3)
            for kind in kinds
        ],
    }
    for name, records in files.items():
        raw = "".join(json.dumps(record) + "\n" for record in records).encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


def test_mixed_prompts(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mixed_prompts", *arguments])
        runpy.run_module("lab.pair.mixed_prompts", run_name="__main__")

    published_prompts(tmp_path)
    out = tmp_path / "mixed.jsonl"
    asked = (str(tmp_path), "--per-task", "2", "--out", str(out))
    with pytest.raises(SystemExit, match="1 prompts of summarization of at most 100 characters"):
        run(*asked, "--longest", "100")
    assert not out.exists()
    run(*asked)
    prompts = read_prompts(out)
    tasks = ["gsm8k", "humaneval", "mt_bench", "summarization", "translation", "prose"]
    assert [prompt.task for prompt in prompts] == [task for task in tasks for _ in range(2)]
    question, *others = [prompt.text for prompt in prompts[:10:2]]
    assert question == "Question: How many are 0 and 2?\nAnswer:"
    assert others == ["def one_0():", "Add 0.", "summarization 0", "translation 0"]
    (tmp_path / "humaneval.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match="2"):
        run(*asked)
    assert "lacks humaneval.jsonl.gz" in capsys.readouterr().err
