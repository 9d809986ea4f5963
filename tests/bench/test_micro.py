"""`monge bench micro`: every backend in every cell, what could not run and why, and nothing measured under another's name."""

import json
from dataclasses import replace

import pytest

from monge.bench.micro import StepSettings, measure
from monge.cli import bench_micro
from monge.cli.bench_micro import report
from monge.core.errors import BackendError, OptionError
from monge.networks.hf_tree import HfTreeModel
from tests.engine.tiny import network

SMALL = StepSettings(backends=("eager",), nodes=(1, 3), batch_sizes=(1, 2), context=5, repeats=2)
TURNS = 3 + SMALL.repeats


def target():
    return network("llama", "sdpa")


def test_every_cell_is_read_behind_the_same_text(monkeypatch, capsys):
    """What was read is forgotten; prompts are read whole, and given back."""
    read, lengths, prefilled = [], [], []
    extend, append = HfTreeModel.extend, HfTreeModel.append

    def extended(self, blocks):
        read.append([len(block.token_ids) for block in blocks.values()])
        lengths.extend(self.length(row) for row in blocks)
        return extend(self, blocks)

    def appended(self, pieces):
        prefilled.append([len(tokens) for tokens in pieces.values()])
        append(self, pieces)

    monkeypatch.setattr(HfTreeModel, "extend", extended)
    monkeypatch.setattr(HfTreeModel, "append", appended)
    document = measure(replace(SMALL, prompts=(7, 20)), target())
    pairs = [(batch, size) for batch in (1, 2) for size in (1, 3)]
    assert read == [[nodes] * batch for batch, nodes in pairs for _ in range(TURNS)]
    assert set(lengths) == {SMALL.context}
    prompts = [(batch, prompt) for batch in (1, 2) for prompt in (7, 20)]
    asked = [[prompt] * batch for batch, prompt in prompts for _ in range(TURNS)]
    assert prefilled[-len(asked) :] == asked
    cells = [(one["batch"], one.get("nodes") or one["prompt"]) for one in document["cells"]]
    assert cells == pairs + prompts
    for one in document["cells"]:
        assert len(one["step_s"]["values"]) == SMALL.repeats
        assert one["ratio"]["median"] == 1.0
        assert one["step_s"]["low"] > 0.0
    json.dumps(document)
    report(document)
    assert capsys.readouterr().out.count("prompt ") == 2


def test_what_runs_eagerly_after_all_has_no_numbers(monkeypatch, capsys):
    def refused(*_, **__):
        raise BackendError("there is no compiler")

    monkeypatch.setattr("monge.backends.cpu.compiled.load_or_make", refused)
    settings = replace(SMALL, backends=("eager", "compiled"), nodes=(1,), batch_sizes=(1,))
    document = measure(settings, target())
    assert {one["backend"] for one in document["cells"]} == {"eager"}
    assert "there is no compiler" in document["missing"]["compiled"]
    report(document)
    shown = capsys.readouterr().out
    assert "batch 1 (ms)" in shown
    assert "compiled: backend 'compiled' is not used" in shown
    with pytest.raises(BackendError, match="compiled: .*there is no compiler"):
        measure(replace(settings, backends=("compiled",)), target())


def test_the_command(run, monkeypatch):
    monkeypatch.setattr(bench_micro, "load_network", lambda source, **_: target())
    sizes = "--nodes 1 --nodes 2 --batch 1 --context 4 --repeats 1 --json"
    result = run("bench", "micro", "--backend", "eager", *sizes.split())
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["settings"]["nodes"] == [1, 2]
    assert len(document["cells"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": (5, 0)}, "prompts must be positive numbers; got"),
        ({"nodes": (0,)}, "nodes must be positive numbers; got"),
        ({"batch_sizes": ()}, "batch_sizes must be positive numbers; got"),
        ({"context": 0}, "context must be at least 1; got 0"),
        ({"backends": ("quick",)}, "unknown backend 'quick'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(OptionError, match=message):
        StepSettings(**settings)


def test_more_than_the_network_reads():
    longest = target().config.max_position_embeddings
    with pytest.raises(OptionError, match=f"are {longest + 3}, and the network reads {longest}"):
        measure(replace(SMALL, context=longest), target())
    message = f"a prompt of {longest + 1} tokens is longer than the {longest}"
    with pytest.raises(OptionError, match=message):
        measure(replace(SMALL, prompts=(longest + 1,)), target())
