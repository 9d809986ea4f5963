"""`monge bench micro`: every backend in every cell, what could not run and why, and nothing measured under another's name."""

import json
from dataclasses import replace

import pytest

from monge.bench.micro import StepSettings, measure
from monge.cli import bench_micro
from monge.cli.bench_micro import micro, report
from monge.core.errors import BackendError, OptionError
from monge.core.model import NodeBlock
from monge.engine.models.hf_tree import HfTreeModel
from tests.engine.tiny import network

SMALL = StepSettings(backends=("eager",), nodes=(1, 3), batch_sizes=(1, 2), context=5, repeats=2)


def target():
    return network("llama", "sdpa")


def test_every_cell_is_read_behind_the_same_text(monkeypatch):
    read, lengths = [], []
    extend = HfTreeModel.extend

    def noted(self, blocks):
        read.append([len(block.token_ids) for block in blocks.values()])
        lengths.append([self.length(row) for row in blocks])
        assert all(isinstance(block, NodeBlock) for block in blocks.values())
        return extend(self, blocks)

    monkeypatch.setattr(HfTreeModel, "extend", noted)
    document = measure(SMALL, target())
    turns = 3 + SMALL.repeats
    assert read == [[nodes] * batch for batch in (1, 2) for nodes in (1, 3) for _ in range(turns)]
    # What was read is forgotten.
    assert all(length == SMALL.context for row in lengths for length in row)
    cells = [(one["batch"], one["nodes"]) for one in document["cells"]]
    assert cells == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for one in document["cells"]:
        assert len(one["step_s"]["values"]) == SMALL.repeats
        assert one["ratio"]["median"] == 1.0
        assert one["step_s"]["low"] > 0.0
    json.dumps(document)


def test_what_runs_eagerly_after_all_has_no_numbers(monkeypatch, capsys):
    def refused(*_, **__):
        raise BackendError("there is no compiler")

    monkeypatch.setattr("monge.backends.cpu.compiled.PendingForward.make", refused)
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


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(bench_micro, "load_network", lambda source, **_: target())
    micro(backend=["eager"], nodes=[1, 2], batch=[1], context=4, repeats=1, as_json=True)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["settings"]["nodes"] == [1, 2]
    assert len(document["cells"]) == 2


def test_prompts_are_read_whole_and_given_back(monkeypatch, capsys):
    read, opened, append = [], [], HfTreeModel.append

    def noted(self, pieces):
        read.append([len(tokens) for tokens in pieces.values()])
        opened.append(self._cache.num_open)
        append(self, pieces)

    monkeypatch.setattr(HfTreeModel, "append", noted)
    document = measure(replace(SMALL, prompts=(7, 20)), target())
    turns = 3 + SMALL.repeats
    assert read[-4 * turns :] == [
        [prompt] * batch for batch in (1, 2) for prompt in (7, 20) for _ in range(turns)
    ]
    assert set(opened) == {1, 2}
    found = [one for one in document["cells"] if "prompt" in one]
    assert [(one["batch"], one["prompt"]) for one in found] == [(1, 7), (1, 20), (2, 7), (2, 20)]
    assert all(len(one["step_s"]["values"]) == SMALL.repeats for one in found)
    report(document)
    assert capsys.readouterr().out.count("prompt ") == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": (5, 0)}, "prompts must be positive numbers; got"),
        ({"nodes": (0,)}, "nodes must be positive numbers; got"),
        ({"batch_sizes": ()}, "batch_sizes must be positive numbers; got"),
        ({"context": 0}, "context must be at least 1; got 0"),
        ({"repeats": 0}, "repeats must be at least 1; got 0"),
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
