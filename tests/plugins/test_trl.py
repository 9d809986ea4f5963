"""Rollouts of TRL's `GRPOTrainer`, unchanged, by an accelerated model; run by `make test-trl`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import monge
from tests.engine.compiling import require, shared_programs
from tests.plugins.trl_rollouts import STEPS, policy, train

ROOT = Path(__file__).parents[2]
KINDS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "adapter": {"adapter": True},
    "adapter, checkpointing": {"adapter": True, "gradient_checkpointing": True},
    "mixed precision": {"bf16": True},
}


@pytest.fixture(scope="module", autouse=True)
def _stored(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory):
        monge.load(policy()[0], backend="compiled", drafter="none")
        yield


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("backend", [None, "compiled"])
def test_rollouts_follow_every_optimizer_step(backend, kind):
    seen, num_runs = train(backend, **kind)
    assert len(seen) == STEPS
    assert len(set(seen)) > 1, "the policy learned nothing, so that old weights would pass"
    assert (num_runs > 0) == (backend is not None and not kind.get("bf16"))


@pytest.mark.parametrize("backend", [None, "compiled"])
def test_rollouts_of_two_processes_follow_the_weights(backend):
    # On a CPU without MPI the launcher has several processes under this name only; they speak gloo.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "-m", "tests.plugins.trl_rollouts"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, *([backend] if backend else [])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ends = re.findall(r"(\d+) texts, (\d+) forwards of programs", done.stdout)
    assert len(ends) == 2
    assert all(int(texts) > 1 for texts, _ in ends)
    assert all((int(runs) > 0) == (backend is not None) for _, runs in ends)
