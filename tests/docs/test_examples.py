"""The examples run, and print what they promise."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def test_add_a_drafter(run):
    law, counts, drafted = run("add_a_drafter.py").splitlines()
    assert float(law.rsplit(" ", 1)[1]) < 1e-12
    num_tokens, num_rounds = map(int, re.findall(r"\d+", counts))
    assert num_rounds < num_tokens == 32
    assert drafted == "drafted by Followers, model"


def test_the_readme_and_the_reference_show_parts_as_objects():
    root = EXAMPLES.parent
    assert "drafter=Pool(Ngram(min_ngram=2), Model())" in (root / "README.md").read_text()
    page = (root / "docs" / "reference.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    assert repr(made["decoder"]) == repr(made["same"])


def test_compare_draft_laws(run):
    head, _, *rows = run("compare_draft_laws.py", "3").splitlines()
    assert len(rows) == 8
    best = head.split(" | ").index("i.i.d.")
    assert all(0.0 < float(row.strip("| ").split(" | ")[best]) <= 1.0 for row in rows)
