"""One target in two gloo processes: the text of one process, and rank 0's verdict on both."""

import json
import multiprocessing
import os
import socket
import warnings
from collections.abc import Mapping

import pytest
import torch
from typer.testing import CliRunner

from monge.api import load
from monge.cli.app import app as commands
from monge.core.errors import BackendError, OptionError, UnsupportedModelError
from monge.engine.loading import as_sequence_model
from monge.scale import tensor_parallel as room
from monge.scale.led_model import LedModel
from monge.scale.ranks import Ranks
from monge.testing.tabular import RandomTable, TabularModel
from tests.bench.tiny import save_pair

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [300, 7, 300]]
GREEDY = {"max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": 3}
TREES = {"tree": "fixed_width((2, 2))", "max_batch_size": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


class Account:
    """What a rank was made to commit, and how often its logits, perturbed, would have said something else."""

    def __init__(self):
        self.texts, self.read, self.num_differing = {}, {}, 0

    def watch(self, model):
        opened, extended, committed = model.open, model.extend, model.commit

        def open_(prefixes):
            self.texts |= {sequence: [] for sequence in prefixes}
            opened(prefixes)

        def extend(blocks):
            logits = extended(blocks)
            perturbed = {one: logits[one] + torch.linspace(0, 2, logits[one].shape[-1]) for one in blocks}
            for sequence, block in blocks.items():
                self.read.setdefault(sequence, []).extend(block.token_ids)
                self.num_differing += int((perturbed[sequence].argmax(-1) != logits[sequence].argmax(-1)).sum())
            return perturbed

        def commit(paths):
            committed(paths)
            for sequence, path in paths.items():
                read = self.read.pop(sequence, None)  # a prompt is committed as it is read
                if read is not None:
                    self.texts[sequence] += [read[node] for node in path]

        model.open, model.extend, model.commit = open_, extend, commit


def as_rank(rank, port, pair, folder):
    """What one process does; rank 0 writes what it decoded, the other what it was made to commit."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    account, follow = Account(), room.follow

    def watched(model, ranks):
        account.watch(model)
        follow(model, ranks)

    room.follow = watched
    with room.tensor_parallel(*pair, **TREES) as decoder:
        if decoder is not None:
            told = {"name": repr(decoder.parts.target)}
            for name, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
                told[name] = [list(result.token_ids) for result in decoder.generate(PROMPTS, **options)]
            (folder / "0").write_text(json.dumps(told))
    if rank:
        (folder / "1").write_text(json.dumps({"texts": account.texts, "differing": account.num_differing}))


@pytest.fixture(scope="module")
def ranks(pair, tmp_path_factory) -> Mapping[str, dict]:
    pytest.importorskip("accelerate", reason="transformers shards with accelerate: pip install 'monge[scale]'")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Forked, because importing everything again would take longer than the tests.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=as_rank, args=(rank, port, pair, folder)) for rank in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return {rank: json.loads((folder / rank).read_text()) for rank in "01"}


@pytest.mark.parametrize(("name", "options"), [("greedy", GREEDY), ("sampled", SAMPLED)])
def test_two_processes_write_the_text_of_one(pair, ranks, name, options):
    alone = load(*pair, **TREES).generate(PROMPTS, **options)
    assert ranks["0"][name] == [list(result.token_ids) for result in alone]
    assert "2 ranks" in ranks["0"]["name"]


def test_the_verdict_of_rank_0_holds_on_a_rank_that_would_decide_otherwise(ranks):
    assert ranks["1"]["differing"] > 0
    written = [*ranks["0"]["greedy"], *ranks["0"]["sampled"]]
    for prompt, completion, kept in zip(PROMPTS * 2, written, ranks["1"]["texts"].values(), strict=True):
        # The last token is never read.
        assert kept[:1] == prompt[-1:]
        assert kept[1:] == completion[: len(kept) - 1]
        assert len(kept) - 1 >= len(completion) - 3


def test_one_process_is_told_to_use_torchrun(pair, monkeypatch):
    monkeypatch.setattr(room, "find_spec", lambda _: object())
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match=r"torchrun --nproc-per-node 2"), room.tensor_parallel(*pair):
        pass


def test_the_command_without_torchrun(pair, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(room, "find_spec", lambda _: object())
    result = CliRunner().invoke(commands, ["generate", "Once", "--target", pair[0], "--tensor-parallel"])
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2" in result.stderr


def test_accelerate_is_asked_for(pair, monkeypatch):
    monkeypatch.setattr(room, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install 'monge\[scale\]'"), room.tensor_parallel(*pair):
        pass


@pytest.mark.parametrize("option", [{"backend": "compiled"}, {"device": "cpu"}])
def test_options_that_every_rank_decides(pair, option):
    with pytest.raises(OptionError, match=f"{next(iter(option))} cannot be chosen"), room.tensor_parallel(*pair, **option):
        pass


def test_a_sharded_network_is_refused_elsewhere(pair, monkeypatch):
    from monge.engine import loading

    network = loading.load_network(pair[0])
    monkeypatch.setattr(loading, "is_sharded", lambda _: True)
    with pytest.raises(UnsupportedModelError, match="--tensor-parallel"):
        as_sequence_model(network)


def test_a_failed_call_leaves_the_ranks_out_of_step(monkeypatch):
    monkeypatch.setattr(Ranks, "tell", lambda *_: None)
    model = LedModel(TabularModel(RandomTable(5, 1), 5), object.__new__(Ranks))
    model.open({0: (1, 2)})
    with pytest.raises(KeyError):
        model.commit({9: ()})
    with pytest.raises(BackendError, match="out of step since commit failed on rank 0"):
        model.close(0)
