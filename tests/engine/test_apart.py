"""Work in a thread of its own."""

import threading
from types import SimpleNamespace

import pytest

from monge.control.base import Memory
from monge.engine import costs
from monge.engine.apart import apart
from monge.engine.clock import measured_by, now


def test_it_runs_elsewhere_and_nothing_stays():
    before = threading.active_count()
    assert apart(threading.get_ident) != threading.get_ident()
    assert threading.active_count() == before


def test_the_callers_clock_holds():
    with measured_by(lambda: 7.0):
        assert apart(now) == 7.0


def test_errors_reach_the_caller():
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 / 0)


@pytest.mark.usefixtures("unchecked_types")
def test_costs_are_measured_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(costs, "measure_costs", lambda *_, **__: seen.append(threading.get_ident()))
    monkeypatch.setattr(costs, "costs_key", lambda _: "key")
    monkeypatch.setattr(costs, "replace", lambda parts, **_: parts)
    costs.with_costs(SimpleNamespace(reads=frozenset({"costs"}), memory=Memory()), batch_sizes=(1,))
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()
