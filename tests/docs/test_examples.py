"""The examples run, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart():
    assert "the same greedy tokens: True" in run("quickstart.py")


def test_prove_a_rule():
    right, wrong = run("prove_a_rule.py").splitlines()
    assert float(right.rsplit(" ", 1)[1]) < 1e-12
    assert float(wrong.rsplit(" ", 1)[1]) > 1e-3


def test_compare_draft_laws():
    head, _, *rows = run("compare_draft_laws.py", "3").splitlines()
    assert len(rows) == 8
    best = head.split(" | ").index("i.i.d.")
    assert all(0.0 < float(row.strip("| ").split(" | ")[best]) <= 1.0 for row in rows)
