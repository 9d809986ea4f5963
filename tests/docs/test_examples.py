"""The examples run, and print what they promise."""

import gzip
import json
import re
import runpy
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import read_prompts

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What an example prints, run as a script, without a process of its own."""

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_quickstart(run):
    text, counts, streamed = run("quickstart.py").rsplit("\n", 3)[:3]
    assert re.fullmatch(r"\d+ tokens in \d+ target forwards", counts)
    assert text
    assert text.endswith(streamed)


def test_transformers_drop_in(run):
    assert "the same greedy tokens: True" in run("transformers_drop_in.py")


def test_chat(run):
    printed = run("chat.py")
    assert printed.count("> Name three") == 2
    assert printed.endswith("\n4 messages\n")


def test_prove_a_rule(run):
    right, wrong = run("prove_a_rule.py").splitlines()
    assert float(right.rsplit(" ", 1)[1]) < 1e-12
    assert float(wrong.rsplit(" ", 1)[1]) > 1e-3


def test_compare_draft_laws(run):
    head, _, *rows = run("compare_draft_laws.py", "3").splitlines()
    assert len(rows) == 8
    best = head.split(" | ").index("i.i.d.")
    assert all(0.0 < float(row.strip("| ").split(" | ")[best]) <= 1.0 for row in rows)


def published_prompts(folder: Path) -> None:
    def write(name: str, records: list[dict[str, object]]) -> None:
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_bytes(
            gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        )

    write(
        "gsm8k_test.jsonl",
        [{"question": f"How many are {n} and 2?", "answer": "#### 3"} for n in range(3)],
    )
    write("humaneval.jsonl.gz", [{"task_id": n, "prompt": f"def one_{n}():"} for n in range(3)])
    write(
        "mt_bench_question.jsonl",
        [{"category": "math", "turns": [f"Add {n}.", "Again."]} for n in range(3)],
    )
    kinds = ("math", "translation", "summarization")
    turns = [
        {"category": kind, "turns": [f"{kind} {'long ' * (30 * n)}{n}"]}
        for n in range(3)
        for kind in kinds
    ]
    write("spec_bench_question.jsonl", turns)


def test_mixed_prompts(run, tmp_path):
    published_prompts(tmp_path)
    run(
        "mixed_prompts.py", str(tmp_path), "--per-task", "2", "--out", str(tmp_path / "mixed.jsonl")
    )
    prompts = read_prompts(tmp_path / "mixed.jsonl")
    tasks = ["gsm8k", "humaneval", "mt_bench", "summarization", "translation", "prose"]
    assert [prompt.task for prompt in prompts] == [task for task in tasks for _ in range(2)]
    assert [prompt.text for prompt in prompts[:5]] == [
        "Question: How many are 0 and 2?\nAnswer:",
        "Question: How many are 1 and 2?\nAnswer:",
        "def one_0():",
        "def one_1():",
        "Add 0.",
    ]
    assert [prompt.text for prompt in prompts[6:10:2]] == ["summarization 0", "translation 0"]


def test_mixed_prompts_says_what_is_missing(run, capsys, tmp_path):
    published_prompts(tmp_path)
    out = tmp_path / "out"
    limits = ("--per-task", "2", "--longest", "100")
    with pytest.raises(
        SystemExit,
        match="there are 1 prompts of summarization of at most 100 characters; expected 2",
    ):
        run("mixed_prompts.py", str(tmp_path), *limits, "--out", str(out))
    (tmp_path / "humaneval.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match="2"):
        run("mixed_prompts.py", str(tmp_path))
    assert "lacks humaneval.jsonl.gz" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_second_target(run, tmp_path):
    dim, hidden, layers, heads, kv_heads, vocab, length = sizes = (8, 12, 2, 2, 1, 262, 32)
    per_layer = 2 * dim + dim * dim * 2 + 2 * dim * (dim * kv_heads // heads) + 3 * dim * hidden
    numbers = [
        0.01 * (index % 17)
        for index in range(vocab * dim + layers * per_layer + dim + length * dim // heads)
    ]
    (tmp_path / "small.bin").write_bytes(
        struct.pack("<7i", *sizes) + struct.pack(f"<{len(numbers)}f", *numbers)
    )
    pieces = [
        *(f"<{index}>" for index in range(3)),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        " ",
        "a",
        " a",
    ]
    packed = [
        struct.pack("<fi", -float(index), len(piece)) + piece.encode()
        for index, piece in enumerate(pieces)
    ]
    (tmp_path / "pieces.bin").write_bytes(struct.pack("<i", 6) + b"".join(packed))
    run(
        "second_target.py",
        str(tmp_path / "small.bin"),
        str(tmp_path / "pieces.bin"),
        "--out",
        str(tmp_path / "out"),
    )
    network, tokenizer = load_network(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    assert network.config.num_key_value_heads == kv_heads
    assert tokenizer("a")["input_ids"] == [1, 261]
    assert tokenizer.decode([261, 260]) == "aa"
    assert torch.isfinite(network(torch.tensor([[1, 261]])).logits).all()
