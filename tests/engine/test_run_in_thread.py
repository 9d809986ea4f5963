"""Work in a thread of its own."""

import threading
from types import SimpleNamespace

import pytest

from monge.control.base import SharedState
from monge.engine import latency_measurement
from monge.engine.clock import measured_by, now
from monge.engine.run_in_thread import run_in_thread


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
