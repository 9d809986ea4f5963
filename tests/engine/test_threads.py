"""Work in a thread of its own."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from monge.control.base import SharedState
from monge.engine import latency_measurement, threads
from monge.engine.clock import measured_by, now
from monge.engine.threads import release_openmp_pool, run_in_thread


def test_it_runs_elsewhere_and_nothing_stays():
    before = threading.active_count()
    assert run_in_thread(threading.get_ident) != threading.get_ident()
    assert threading.active_count() == before


def test_the_callers_clock_holds():
    with measured_by(lambda: 7.0):
        assert run_in_thread(now) == 7.0


def test_errors_reach_the_caller():
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 / 0)


@pytest.mark.usefixtures("unchecked_types")
def test_costs_are_measured_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(
        latency_measurement, "measure_latency", lambda *_, **__: seen.append(threading.get_ident())
    )
    monkeypatch.setattr(latency_measurement, "latency_key", lambda _: "key")
    monkeypatch.setattr(latency_measurement, "replace", lambda parts, **_: parts)
    latency_measurement.with_latency(
        SimpleNamespace(reads=frozenset({"latency"}), shared=SharedState()), batch_sizes=(1,)
    )
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()


def num_os_threads():
    """Threads of this process, once their number has settled: they end in their own time."""
    counts = []
    while len(counts) < 100 and (len(counts) < 20 or len(set(counts[-20:])) > 1):
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        time.sleep(0.01)
    return counts[-1]


def test_the_callers_pool_of_openmp_threads_ends():
    """A pool beside that of the thread that decodes makes every forward wake its threads."""
    if not threads._runtimes():
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
