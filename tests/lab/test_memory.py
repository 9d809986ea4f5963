"""`python -m lab.memory`: every backend in a process of its own, growth where there is some, and who could not run."""

import json
from mmap import mmap
from multiprocessing import Pipe
from pathlib import Path

import pytest

from lab.memory import measure as module
from lab.memory.__main__ import main as memory
from lab.memory.measure import MIB, MemorySettings, measure, summary
from monge.core.errors import BackendError

SMALL = MemorySettings(backends=("eager",), rounds=6, samples=3)
linux = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="only Linux says what a process holds"
)


def told(settings, backend):
    """What a process would tell."""
    receiver, sender = Pipe(duplex=False)
    module._decode(settings, backend, sender)
    sender.close()
    messages = []
    while receiver.poll():
        try:
            messages.append(json.loads(receiver.recv_bytes()))
        except EOFError:
            break
    return messages


@linux
def test_what_is_kept_shows_as_growth(monkeypatch):
    kept = []

    class Keeper:
        def generate(self, *args, **kwargs):
            # New ones: the heap may have room that earlier tests gave back.
            pages = mmap(-1, 16 * MIB)
            pages.write(b"x" * len(pages))
            kept.append(pages)
            return [type("Result", (), {"stats": type("Stats", (), {"num_rounds": 1})})]

    monkeypatch.setattr(module, "load", lambda **_: Keeper())
    *samples, last = told(MemorySettings(backends=("eager",), rounds=8, samples=4), "eager")
    assert last == {"kind": "done"}
    assert [one["round"] for one in samples] == [0, 2, 4, 6, 8]
    sizes = [{name: one[name] for name in ("round", "resident", "peak")} for one in samples]
    assert summary(sizes)["growth"] > 40 * MIB


@linux
def test_processes_that_cannot_be_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_STATM", tmp_path / "none")
    with pytest.raises(BackendError, match="does not say what a process holds"):
        measure(SMALL)


@linux
@pytest.mark.slow
def test_the_command(capsys):
    sizes = {"rounds": 6, "samples": 3, "max_new_tokens": 4}
    memory(backend=["eager"], temperature=0.0, threads=1, as_json=True, **sizes)
    shown = capsys.readouterr().out
    assert "resident memory (MiB)" in shown
    document = json.loads(shown.splitlines()[-1])
    assert document["settings"]["temperature"] == 0.0
    (one,) = document["backends"]
    rounds = [sample["round"] for sample in one["samples"]]
    assert rounds[0] == 0
    assert rounds == sorted(set(rounds))
    assert rounds[-1] >= 6
    assert all(MIB < sample["resident"] <= sample["peak"] for sample in one["samples"])
