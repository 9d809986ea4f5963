"""The proposer in a real vLLM: greedy texts are those of vLLM without speculation.

Run by `make test-vllm`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monge.api import built_in

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM; make test-vllm makes its environment", allow_module_level=True)

PROMPTS = [
    "The history of",
    "Question: Tom has 3 apples and buys 4 more apples. How many apples does he have?\nAnswer:",
    "Instruction: Name three colours.\nResponse:",
    "def main():\n    print(1)\n    print(2)\n    print(3)\n",
    "one two three four five one two three four five one two three",
    "Once upon a time there was a little girl who lived in a house near the sea.",
]
HOOK = "monge.plugins.vllm.Proposer"


def run(model=None, *, max_num_seqs=4, **settings):
    speculative = {"method": "custom_class", "model": model, "num_speculative_tokens": 5}
    asked = {
        "target": str(built_in("target")),
        "prompts": PROMPTS,
        "max_tokens": 48,
        "max_num_seqs": max_num_seqs,
        "speculative": None if model is None else speculative,
        "additional": {"monge": settings} if settings else {},
    }
    command = [sys.executable, str(Path(__file__).with_name("vllm_host.py")), json.dumps(asked)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


def answer(done):
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def plain():
    return answer(run())["token_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drafter": "ngram", "controller": "fixed"},
        {"drafter": "pool('ngram', 'suffix(width=1)')"},
    ],
    ids=["default", "ngram", "pool"],
)
def test_greedy_texts_are_those_of_plain_decoding(plain, settings):
    found = answer(run(HOOK, **settings))
    assert found["token_ids"] == plain
    counters = found["counters"]
    drafted, accepted = (
        counters[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")
    )
    assert 0 < accepted <= drafted, counters
    assert drafted < 5 * counters["vllm:spec_decode_num_drafts"], (
        "every draft has the full length: windows do not adapt"
    )


def test_a_setting_that_cannot_be_ends_the_start():
    done = run(HOOK, drafter="suffix")
    assert done.returncode != 0
    assert "vLLM verifies single chains" in done.stdout + done.stderr
