"""One target in two gloo processes: the text of one process, and rank 0's verdict on both."""

import json
import multiprocessing
import os
import signal
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager, suppress

import httpx
import pytest
import torch
from typer.testing import CliRunner

from monge.api import load, make_components
from monge.cli.app import app as commands
from monge.core.errors import OptionError, UnsupportedModelError
from monge.distributed import tensor_parallel as room
from monge.distributed.tensor_parallel import RankZeroModel
from monge.engine.decoder import Decoder
from monge.loading.networks import as_sequence_model
from monge.serve.scheduling.scheduler import Scheduler
from tests.bench.tiny import save_pair
from tests.serve.served import is_refused
from tests.serve.toy import Model, generation, submit

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [300, 7, 300]]
GREEDY = {"max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": 3}
PATIENCE_S = 600
"""How long a busy machine may take; nothing here waits for time to pass."""
TREES = {"tree": "fixed_width((2, 2))", "max_batch_size": 2, "controller": "fixed"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


class Account:
    """The tokens that a rank was made to commit; counts where its perturbed logits would differ."""

    def __init__(self):
        self.texts, self.read, self.num_differing = {}, {}, 0

    def watch(self, model):
        opened, extended, committed = model.open, model.extend, model.commit

        def open_(prefixes):
            self.texts |= {sequence: [] for sequence in prefixes}
            opened(prefixes)

        def extend(blocks):
            logits = extended(blocks)
            perturbed = {
                one: logits[one] + torch.linspace(0, 2, logits[one].shape[-1]) for one in blocks
            }
            for sequence, block in blocks.items():
                self.read.setdefault(sequence, []).extend(block.token_ids)
                self.num_differing += int(
                    (perturbed[sequence].argmax(-1) != logits[sequence].argmax(-1)).sum()
                )
            return perturbed

        def commit(paths):
            committed(paths)
            for sequence, path in paths.items():
                read = self.read.pop(sequence, None)  # a prompt is committed as it is read
                if read is not None:
                    self.texts[sequence] += [read[node] for node in path]

        model.open, model.extend, model.commit = open_, extend, commit


def become(rank, port):
    """Set the environment that torchrun gives a process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def texts(decoder, options):
    return [list(result.token_ids) for result in decoder.generate(PROMPTS, **options)]


def as_rank(rank, port, pair, folder):
    """Decode; rank 0 writes its tokens, the other one those that it was made to commit."""
    become(rank, port)
    account, follow = Account(), room.follow

    def watched(model, receive):
        account.watch(model)
        follow(model, receive)

    room.follow = watched
    with room.tensor_parallel(*pair, **TREES) as decoder:
        if decoder is not None:
            told = {"name": repr(decoder.components.target)}
            told |= {"greedy": texts(decoder, GREEDY), "sampled": texts(decoder, SAMPLED)}
            (folder / "0").write_text(json.dumps(told))
    if rank:
        told = {"texts": account.texts, "differing": account.num_differing}
        (folder / "1").write_text(json.dumps(told))


def serve_as_rank(rank, port, pair, http_port):
    """Run `monge serve --tensor-parallel`; a rank that follows has no address of its own."""
    become(rank, port)
    options = ["--port", str(http_port), "--tree", TREES["tree"], "--drain", str(PATIENCE_S)]
    commands(["serve", *pair, *options, "--tensor-parallel"])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def two(work, *arguments):
    """Two processes, which have ended well at the end."""
    pytest.importorskip(
        "accelerate", reason="transformers shards with accelerate: pip install '.[distributed]'"
    )
    # Forked, because importing everything again would take longer than the tests.
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=work, args=(rank, port, *arguments)) for rank in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    try:
        yield processes
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.fixture(scope="module")
def ranks(pair, tmp_path_factory) -> Mapping[str, dict]:
    folder = tmp_path_factory.mktemp("ranks")
    with two(as_rank, pair, folder):
        pass
    return {rank: json.loads((folder / rank).read_text()) for rank in "01"}


def test_two_processes_write_the_text_of_one(pair, ranks):
    alone = load(*pair, **TREES)
    assert ranks["0"]["greedy"] == texts(alone, GREEDY)
    assert ranks["0"]["sampled"] == texts(alone, SAMPLED)
    assert "2 ranks" in ranks["0"]["name"]


def test_the_verdict_of_rank_0_holds_on_a_rank_that_would_decide_otherwise(ranks):
    assert ranks["1"]["differing"] > 0
    written = [*ranks["0"]["greedy"], *ranks["0"]["sampled"]]
    for prompt, completion, kept in zip(
        PROMPTS * 2, written, ranks["1"]["texts"].values(), strict=True
    ):
        # The last token is never read.
        assert kept[:1] == prompt[-1:]
        assert kept[1:] == completion[: len(kept) - 1]
        assert len(kept) - 1 >= len(completion) - 3


def wait_for(is_so, processes):
    while not is_so():
        assert all(process.is_alive() for process in processes), "a rank is gone"
        time.sleep(0.05)


def is_healthy(url):
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    return False


def test_two_processes_serve_the_text_of_one_and_finish_it_when_both_are_told_to_stop(pair):
    (alone,) = load(*pair, **TREES).generate([PROMPTS[0]], **SAMPLED)
    asked = SAMPLED | {"prompt": PROMPTS[0], "max_tokens": 24}
    del asked["max_new_tokens"]
    url = f"http://127.0.0.1:{(http_port := free_port())}"
    with two(serve_as_rank, pair, http_port) as processes:
        wait_for(lambda: is_healthy(url), processes)
        body = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
        told = {"json": asked | {"stream": True, "max_tokens": 200}, "timeout": PATIENCE_S}
        with httpx.stream("POST", f"{url}/v1/completions", **told) as answer:
            lines = answer.iter_lines()
            next(lines)
            # No round can end while rank 1 stands still, so the signals come to a stream that is
            # under way.
            os.kill(processes[1].pid, signal.SIGSTOP)
            for process in reversed(processes):  # as torchrun does when it is told to stop
                process.terminate()
            wait_for(lambda: is_refused(url), processes)
            os.kill(processes[1].pid, signal.SIGCONT)
            written = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert body["choices"][0]["text"] == alone.text
    assert written[-1]["choices"][0]["finish_reason"] == "length"


def alone(model):
    """A model on rank 0, whose calls nobody receives."""
    return RankZeroModel(model, 2, lambda *_: None)


def test_ranks_that_are_out_of_step_serve_no_more():
    network = Model(1)
    network.failing.add(5)
    parts = make_components(alone(network), Model(2), tree="chain(3)")
    with Scheduler(Decoder(parts, tokenizer=None, max_batch_size=4)) as scheduler:
        assert submit(scheduler, generation(1, 2)).completion(60).finish_reason == "length"
        assert submit(scheduler, generation(5, 2)).completion(60).finish_reason == "error"
        scheduler._thread.join(60)
        assert "out of step since extend failed on rank 0" in scheduler.snapshot().failure
        assert not scheduler.snapshot().is_open


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "torchrun --nproc-per-node 2"),
        ({"backend": "compiled"}, "backend cannot be chosen"),
        ({"device": "cpu"}, "device cannot be chosen"),
    ],
    ids=str,
)
def test_invalid_starts(pair, monkeypatch, options, message):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match=message), room.tensor_parallel(*pair, **options):
        pass


def test_the_command_without_torchrun(pair, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    asked = ["generate", "Once", "--target", pair[0], "--tensor-parallel"]
    result = CliRunner().invoke(commands, asked)
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2" in result.stderr


def test_accelerate_is_needed(pair, without):
    without("accelerate")
    expected = r'needs accelerate, .* pip install "\.\[distributed\]"'
    with pytest.raises(OptionError, match=expected), room.tensor_parallel(*pair):
        pass


def test_a_sharded_network_is_refused_elsewhere(pair, monkeypatch):
    from monge.loading import networks as loading

    network = loading.load_network(pair[0])
    monkeypatch.setattr(loading, "is_sharded", lambda _: True)
    with pytest.raises(UnsupportedModelError, match="--tensor-parallel"):
        as_sequence_model(network)
