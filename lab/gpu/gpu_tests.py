"""The tests marked `gpu`, in a process of their own."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine
from monge.core.errors import MongeError

_ROOT: Final = Path(__file__).parents[2]
_NAMED: Final = 5  # failed tests that are named
_SHARE: Final = 0.25
"""Most of the time that tests may take."""
_OUTCOME: Final = re.compile(r"^\S+/(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def failed_tests(machine: Machine, until: float) -> list[Figure]:
    """Return the number of tests that fail, of those that end in time."""
    # Collecting every file would take longer than the tests.
    found = sorted((_ROOT / "tests").rglob("test_*.py"))
    files = [str(one) for one in found if "pytest.mark.gpu" in one.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--color=no", "--tb=line"]
    # Without checks of types at run time, which older versions of torch cannot compile.
    command += ["-o", "addopts=--import-mode=importlib", *files]
    limit = _SHARE * max(0.0, until - time.perf_counter())
    settings = {"cwd": _ROOT, "env": os.environ | {"PYTHONUNBUFFERED": "1"}, "timeout": limit}
    try:
        done = subprocess.run(command, capture_output=True, check=False, **settings)
        output, ending = done.stdout + done.stderr, ""
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f", stopped after {limit:.0f} s"
    text = output.decode(errors="replace")
    outcomes = _OUTCOME.findall(text)
    counts = Counter(word for _, word in outcomes)
    said = ", ".join(f"{count} {word.lower()}" for word, count in sorted(counts.items())) + ending
    failed = [name for name, word in outcomes if word in {"FAILED", "ERROR"}]
    if not failed and not counts["PASSED"]:
        raise MongeError(f"no test ran: {said or ' '.join(text.split())[-200:]}")
    detail = "; ".join([said, *failed[:_NAMED]])
    return [
        Figure(name="tests marked `gpu` that fail", values=(len(failed),), goal=0, detail=detail)
    ]
