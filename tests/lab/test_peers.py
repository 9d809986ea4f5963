"""Peers: the search takes the fastest, failures stay with their arm, and what is reported is what was measured."""

import json
import math

import pytest
import torch

from lab.peers import compare as module
from lab.peers import environments as peer_environments
from lab.peers.compare import PeerSettings, compare_peers
from lab.peers.engines import OURS, PEERS, Method, Peer, gguf_peers
from lab.peers.environments import install, python_of
from lab.peers.process import Completion, PeerProcess
from lab.peers.report import facts_table
from lab.peers.workers.engine_monge import Engine
from monge.core.errors import BackendError
from monge.loading.networks import load_network

PROMPTS = ((1, 2), (3, 4, 5))
TEXT = tuple(range(100, 164))


class FakeProcess(PeerProcess):
    """An engine whose speed is in its settings."""

    made, running, opened = [], set(), []
    start_s = 1.5

    def __init__(self, python, engine):
        self.engine, self.settings = engine, {}
        FakeProcess.made.append(self)  # so that no two have one id

    def stop(self):
        FakeProcess.running.discard(id(self))

    def open(self, **request):
        FakeProcess.running.add(id(self))
        FakeProcess.opened.append((self.engine, request["method"], dict(request["settings"])))
        self.settings = request["settings"]
        self.method = request["method"]
        if self.settings.get("broken"):
            raise BackendError(f"{self.engine}: no such thing")
        return "1.2.3"

    def peak_bytes(self):
        return 7 << 20

    def nats(self, token_ids):
        return math.log(2) * (len(token_ids) - 2)

    def generate(self, prompt_ids, *, max_new_tokens, temperature, seed):
        if self.settings.get("dies") and max_new_tokens > module.WARM_UP_TOKENS:
            raise BackendError(f"{self.engine} has ended: out of memory")
        text = (7,) * max_new_tokens if self.settings.get("loops") else TEXT[:max_new_tokens]
        seconds = max_new_tokens * self.settings.get("token_s", 0.01)
        return Completion(token_ids=text, seconds=seconds)


def speeds(*seconds):
    return tuple({"token_s": value} for value in seconds)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(module, "PeerProcess", FakeProcess)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    for notes in (FakeProcess.made, FakeProcess.running, FakeProcess.opened):
        notes.clear()
    yield
    assert not FakeProcess.running, "every engine was to be ended"


def settings(tmp_path, **changes):
    usual = {"target": "t", "draft": "d", "threads": 1, "max_new_tokens": 32, "repeats": 2}
    return PeerSettings(work=tmp_path, **usual, **changes)


def run(tmp_path, *peers, **changes):
    document = compare_peers(peers, PROMPTS, settings(tmp_path, **changes), notify=lambda _: None)
    json.dumps(document)  # everything is plain
    return document


def peer(name, method, *candidates, **options):
    return Peer(name=name, methods={method: Method(candidates=candidates, **options)})


HOST = peer("transformers", "plain", *speeds(0.02))
GREEDY = {"temperatures": (0.0,)}


@pytest.mark.usefixtures("fake")
class TestComparing:
    def test_the_fastest_setting_is_measured(self, tmp_path):
        ours = peer("monge", "eager", *speeds(0.01, 0.004, 0.005))
        _, arm = run(tmp_path, HOST, ours, **GREEDY)["arms"]
        assert arm["settings"] == {"token_s": 0.004}
        assert [round(tried["tokens_per_s"]) for tried in arm["tried"]] == [100, 250, 200]
        assert arm["tokens_per_s"]["median"] == pytest.approx(250)
        assert arm["ratio_to_plain"] == pytest.approx(5)
        assert arm["same_as_plain_share"] == 1
        opened = [settings["token_s"] for _, _, settings in FakeProcess.opened]
        assert opened == [0.02, 0.01, 0.004, 0.005], "the fastest engine stays open"

    def test_headline(self, tmp_path):
        seconds = {"eager": 0.01, "openvino": 0.002}
        methods = {name: Method(candidates=speeds(value)) for name, value in seconds.items()}
        ours = Peer(name="monge", methods=methods)
        other = peer("other", "plain", *speeds(0.004))
        headline = run(tmp_path, HOST, ours, other, **GREEDY)["headline"]["0"]
        assert headline["ours"] == "monge openvino"
        assert headline["best_peer"] == "other plain"
        assert headline["over_transformers_plain"] == pytest.approx(10)
        assert headline["over_best_peer"] == pytest.approx(2)

    def test_failures_stay_with_their_arm(self, tmp_path):
        dies = Method(candidates=({"dies": True}, {"dies": True}))
        methods = {"plain": Method(candidates=({"broken": True},)), "draft": dies}
        broken = Peer(name="other", methods=methods)
        document = run(tmp_path, HOST, broken, **GREEDY)
        host, *failed = document["arms"]
        assert host["failure"] is None
        assert len(host["tokens_per_s"]["values"]) == 2
        reasons = ["other: no such thing", "other has ended: out of memory"]
        assert [arm["failure"] for arm in failed] == reasons
        assert all("tokens_per_s" not in arm for arm in failed)
        headline = document["headline"]["0"]
        assert headline["best_peer"] == "transformers plain"
        assert {headline[name] for name in headline if name != "best_peer"} == {None}

    def test_wrong_samplers_are_not_asked_to_sample(self, tmp_path):
        options = {"is_sampled": False, "why_not_sampled": "it forgets q"}
        document = run(tmp_path, HOST, peer("other", "draft", *speeds(0.01), **options))
        arms = [(arm["arm"], arm["temperature"]) for arm in document["arms"]]
        assert arms == [("transformers plain", 0), ("other draft", 0), ("transformers plain", 1)]
        assert document["not_sampled"] == [{"arm": "other draft", "reason": "it forgets q"}]

    def test_loops_and_other_texts_are_reported(self, tmp_path):
        host, arm = run(tmp_path, HOST, peer("other", "plain", {"loops": True}), **GREEDY)["arms"]
        assert (host["degenerate_share"], arm["degenerate_share"]) == (0, 1)
        assert arm["same_as_plain_share"] == 0

    def test_facts_stand_beside_speeds_and_perplexity_beside_plain_decoding(self, tmp_path):
        other = Peer(name="other", methods={"file plain": Method(), "lookup": Method()})
        plain, lookup = run(tmp_path, other, **GREEDY, texts=((1, 2, 3), (4, 5, 6, 7)))["arms"]
        facts = {"peak_bytes": 7 << 20, "start_s": 1.51, "first_token_s": 0.01}
        assert lookup["facts"] == facts
        assert plain["facts"] == facts | {"perplexity": pytest.approx(2)}
        shown = [[*column.cells] for column in facts_table([plain, lookup]).columns]
        assert shown[1:] == [["7", "7"], ["1.5", "1.5"], ["10", "10"], ["2.0000", ""]]

    def test_reading_is_timed_for_prompts_that_the_texts_are_long_enough_for(self, tmp_path):
        other = Peer(name="other", methods={"file plain": Method(), "lookup": Method()})
        texts = tuple(tuple(range(1, 101)) for _ in range(6))
        plain, lookup = run(tmp_path, other, **GREEDY, texts=texts)["arms"]
        assert plain["facts"]["read_128_per_s"] == pytest.approx(128 / 0.01)
        assert plain["facts"]["read_512_per_s"] == pytest.approx(512 / 0.01)
        assert "read_2000_per_s" not in plain["facts"]
        shown = [[*column.cells] for column in facts_table([plain, lookup]).columns]
        assert shown[-2:] == [["12800", ""], ["51200", ""]]


class TestEnvironments:
    def test_a_library_is_compiled_with_the_variables_of_its_peer(self, tmp_path, monkeypatch):
        def create(folder, **_):
            (python := folder / "bin" / "python").parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\necho "$CMAKE_ARGS: $*" > {tmp_path}/said\n')
            python.chmod(0o755)

        monkeypatch.setattr(peer_environments.venv, "create", create)
        _, peer = gguf_peers("")
        install(peer, tmp_path, lambda _: None)
        said = (tmp_path / "said").read_text()
        assert said.startswith("-DGGML_NATIVE=ON: -m pip")
        assert "install --no-binary llama-cpp-python llama-cpp-python==" in said
        assert python_of(peer, tmp_path).is_file()
        assert "draft" not in peer.methods
        assert "draft" in gguf_peers("small.gguf")[1].methods


@pytest.mark.parametrize(
    ("method", "drafter"),
    [("", "Model"), (" lookup", "Ngram"), (" pool", "Pool")],
)
def test_ours_drafts_as_its_method_says(tiny_paths, method, drafter):
    (ours,) = (peer for peer in PEERS if peer.name == OURS)
    target, draft = map(str, tiny_paths)
    settings = dict(ours.methods[f"compiled{method}"].candidates[0])
    given = {"work": "", "threads": 1, "method": f"eager{method}", "settings": settings}
    engine = Engine(target=target, draft=draft, **given)
    assert type(engine._decoder.components.drafter).__name__ == drafter
    made = engine.generate(prompt_ids=[5, 6, 7], max_new_tokens=4, temperature=0.0, seed=0)
    assert len(made) == 4


def test_ours_scores_texts_as_the_network_does(tiny_paths):
    target, draft = map(str, tiny_paths)
    given = {"work": "", "threads": 1, "method": "eager default", "settings": {}}
    engine = Engine(target=target, draft=draft, **given)
    assert engine._decoder.components.controllers, "the defaults"
    text = [5, 6, 7, *range(40)]
    with torch.inference_mode():
        logits = load_network(target)(input_ids=torch.tensor([text])).logits[0].double()
    logs = logits.log_softmax(-1)[1:-1].gather(1, torch.tensor(text[2:])[:, None])
    for _ in range(2):  # nothing stays of the first
        assert engine.score(token_ids=text) == pytest.approx(-float(logs.sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--peer tgi", "unknown peer 'tgi'"),
        ("--target no/such", "peers need the folder of a checkpoint"),
        ("--gguf no/such.gguf", "no file 'no/such.gguf'"),
        ("--gguf a.gguf --target b", "leave --target and --rounded out"),
    ],
)
def test_the_command_refuses(lab, arguments, message):
    result = lab("peers", arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_engines_that_are_not_installed_are_reported(lab, tmp_path):
    result = lab("peers", f"--peer vllm --work {tmp_path}/work --out {tmp_path}/out --quick")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "vllm is not installed in" in shown
    assert "vllm draft is not asked to sample" in shown
    assert (tmp_path / "out" / "peers.json").is_file()
