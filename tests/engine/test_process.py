"""Threads of this process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from monge.runtime import process
from monge.runtime.clock import measured_by, now
from monge.runtime.process import release_openmp_pool, run_in_thread


def test_work_in_a_thread_of_its_own():
    before = threading.active_count()
    assert run_in_thread(threading.get_ident) != threading.get_ident()
    assert threading.active_count() == before
    with measured_by(lambda: 7.0):
        assert run_in_thread(now) == 7.0
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 / 0)


SPINS = """import sys
import typer
import monge.cli as cli
typer.main.get_command(cli.app)  # as a command that is about to run
assert "torch" not in sys.modules, "the runtime of torch has read the environment"
cli.app = lambda: None
cli.main()
import os
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "10000 None"),
        ({"OMP_WAIT_POLICY": "active"}, "None active"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
    ],
)
def test_the_command_bounds_how_long_threads_spin_unless_the_user_does(own, expected):
    names = os.environ.keys() - {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    options = {"env": {name: os.environ[name] for name in names} | own, "check": False}
    done = subprocess.run([sys.executable, "-c", SPINS], capture_output=True, text=True, **options)
    assert done.stdout.strip() == expected, done.stderr


FORKS = """import os, signal, sys, threading
import torch
import monge
torch.set_num_threads(2)
decoder = monge.load(backend=sys.argv[1])
def text():
    options = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    return decoder.generate(["The history of mathematics " * 8], **options)[0].token_ids
expected, is_done = text(), threading.Event()
def decode():
    while not is_done.is_set():
        text()
others = [threading.Thread(target=decode) for _ in range(int(sys.argv[2]))]
for other in others:
    other.start()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(40)
        os._exit(0 if text() == expected else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
is_done.set()
assert text() == expected"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes")
@pytest.mark.parametrize(("backend", "threads"), [("eager", 0), ("eager", 1), ("compiled", 0)])
def test_a_forked_child_decodes_as_its_parent(backend, threads):
    """Neither the pool of OpenMP's threads nor a thread that holds the lock of a round is in the child."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, backend, str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def num_os_threads():
    """Threads of this process, once their number has settled: they end in their own time."""
    counts = []
    while len(counts) < 100 and (len(counts) < 20 or len(set(counts[-20:])) > 1):
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.01)
    return counts[-1]


def test_the_callers_pool_of_openmp_threads_ends():
    """A pool beside that of the thread that decodes makes every forward wake its threads."""
    if not process._runtimes():
        pytest.skip("no GNU OpenMP is loaded")
    before, values = torch.get_num_threads(), torch.ones(1 << 22)
    torch.set_num_threads(3)
    try:
        values.add(1.0)
        release_openmp_pool()
        alone = num_os_threads()
        values.add(1.0)
        assert num_os_threads() == alone + 2
        assert run_in_thread(lambda: float(values.add(1.0)[0])) == 2.0
        assert num_os_threads() == alone
        assert float(values.add(1.0).sum()) == 2 * len(values)
    finally:
        release_openmp_pool()
        torch.set_num_threads(before)
