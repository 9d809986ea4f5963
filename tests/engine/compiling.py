"""Compiled tiny networks for tests.

Each architecture is compiled once a run, whatever the number of test processes.
"""

import fcntl
import os
import shutil
from contextlib import contextmanager

import pytest

from monge.backends.cpu.code_cache import FOLDER_VARIABLE
from monge.backends.cpu.compiled import pending_forward
from monge.backends.cuda import capture_forward
from monge.networks.forward import Forward, NetworkForward
from monge.networks.hf_tree import HfTreeModel

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
MISSING = {"compiled": None if HAS_COMPILER else "there is no C++ compiler"}


def compile_forward(network, layers=()):
    return pending_forward(NetworkForward(network, layers)).make()


def captured_forward(network, capture, layers=(), compiler=None):
    return capture_forward(NetworkForward(network, layers), capture, compiler).run


def read_by(forward, network):
    """A model that reads by this forward."""
    return HfTreeModel(network, lambda _: Forward(forward))


def require(backend: str) -> None:
    """Skip the test where a backend cannot run."""
    if MISSING[backend] is not None:
        pytest.skip(MISSING[backend])


@contextmanager
def shared_programs(tmp_path_factory: pytest.TempPathFactory, make=None):
    """A folder of programs that all test processes of this run share, and one compiler at a time."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / "programs-of-the-tests"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, (folder / "lock").open("w") as lock:
        patch.setenv(FOLDER_VARIABLE, str(folder))

        def compiled(network, *layers):
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return compile_forward(network, layers) if make is None else make(network)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

        yield compiled


def verdicts_of(decoder, texts, **options):
    """How many tokens each round of some requests accepted, and which it wrote."""
    results = decoder.generate(texts, **options)
    rounds = [record for result in results for record in result.records]
    return [(record.num_accepted, record.token_ids) for record in rounds]
