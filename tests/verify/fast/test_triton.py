"""The kernel against torch: same tests, same remainders.

On a CPU the kernel runs in Triton's interpreter, in a process of its own, because it has to be
chosen before the kernel is compiled.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

PROGRAM = """
import torch
from monge.verify.fast.recursive import in_torch
from monge.verify.fast.triton_recursive import recursive
from tests.verify.fast.batches import random_trials

device = "cuda" if torch.cuda.is_available() else "cpu"
for regime in ("rough", "ties", "equal", "single token"):
    for way in ("iid", "without_replacement") if regime == "single token" else ("iid", "mixed", "without_replacement"):
        trials = random_trials(regime, way, device)
        for is_shrinking in (False, True) if way != "mixed" else (False,):
            expected, found = in_torch(trials, is_shrinking=is_shrinking), recursive(trials, is_shrinking=is_shrinking)
            assert torch.equal(found.winners, expected.winners), (regime, way, found.winners, expected.winners)
            is_refused = (expected.winners < 0)[:, None]
            torch.testing.assert_close(found.left * is_refused, expected.left * is_refused, rtol=0, atol=1e-14)
            print(regime, way, is_shrinking, sorted(set(expected.winners.tolist())))
"""


def test_the_kernel_decides_as_torch_does() -> None:
    environment = dict(os.environ) | (
        {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Accepted early, late, and not at all.
    assert len({line.rsplit("[", 1)[1] for line in done.stdout.splitlines()}) > 3
