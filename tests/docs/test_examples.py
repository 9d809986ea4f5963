"""The examples run, and print what they promise."""

import gzip
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_tensor_programs(run):
    printed = run("tensor_programs.py")
    (rounds,) = re.findall(r"48 tokens in (\d+) target forwards", printed)
    assert int(rounds) < 48
    assert "the greedy tokens of transformers: True" in printed


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


def test_mixed_prompts(run, capsys, tmp_path):
    published_prompts(tmp_path)
    out = tmp_path / "mixed.jsonl"
    asked = ("mixed_prompts.py", str(tmp_path), "--per-task", "2", "--out", str(out))
    with pytest.raises(SystemExit, match="1 prompts of summarization of at most 100 characters"):
        run(*asked, "--longest", "100")
    assert not out.exists()
    run(*asked)
    prompts = read_prompts(out)
    tasks = ["gsm8k", "humaneval", "mt_bench", "summarization", "translation", "prose"]
    assert [prompt.task for prompt in prompts] == [task for task in tasks for _ in range(2)]
    assert [prompt.text for prompt in prompts[:10:2]] == [
        "Question: How many are 0 and 2?\nAnswer:",
        "def one_0():",
        "Add 0.",
        "summarization 0",
        "translation 0",
    ]
    (tmp_path / "humaneval.jsonl.gz").unlink()
    with pytest.raises(SystemExit, match="2"):
        run(*asked)
    assert "lacks humaneval.jsonl.gz" in capsys.readouterr().err
