"""Asks a vLLM in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

TEXTS = [
    "The history of",
    "Question: Tom has 3 apples and buys 4 more apples. How many apples does he have?\nAnswer:",
    "Instruction: Name three colours.\nResponse:",
    "def main():\n    print(1)\n    print(2)\n    print(3)\n",
    "one two three four five one two three four five one two three",
    "Once upon a time there was a little girl who lived in a house near the sea.",
]
GREEDY = {"prompts": TEXTS, "rules": [{"temperature": 0.0, "max_tokens": 48}] * len(TEXTS)}


def run(folder, jobs, *, multiprocessing=False, is_async=False, **engine):
    """Run jobs, see `vllm_host`; return the process that has ended, and the file of its answers."""
    request, answer = folder / "request.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    engine = {"max_num_seqs": 64, **engine}
    request.write_text(json.dumps({"engine": engine, "jobs": jobs, "is_async": is_async}))
    command = [sys.executable, str(Path(__file__).with_name("vllm_host.py")), request, answer]
    own = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
    environment = os.environ | own
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    return done, answer


def ask(folder, jobs, **engine):
    """Return the answers to jobs."""
    done, answer = run(folder, jobs, **engine)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(answer.read_text())
