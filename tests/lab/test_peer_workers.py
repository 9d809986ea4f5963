"""Workers: the protocol survives engines that print, fail and die.

Checkpoints are converted number by number.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lab.peers import process as peer_process
from lab.peers.process import PeerProcess
from monge.api import built_in
from monge.core.errors import BackendError

FAKE = """
import os, time
class Engine:
    version = "9"
    def __init__(self, *, target, draft, work, threads, method, settings):
        print("engines print", flush=True)
        if method == "broken":
            raise ValueError("no such method")
        self.method = method
    def score(self, *, token_ids):
        return 0.5 * len(token_ids)
    def generate(self, *, prompt_ids, max_new_tokens, temperature, seed):
        print("whatever they like", flush=True)
        if self.method == "dies":
            os.write(2, b"out of memory\\n")
            os._exit(3)
        if self.method == "sleeps":
            time.sleep(60)
        count = max_new_tokens - (self.method == "short")
        return [prompt_ids[0] + seed] * count
"""
RULES = {"max_new_tokens": 4, "temperature": 0, "seed": 2}
FOLDERS = {"target": "t", "draft": "d", "work": "w", "threads": 1, "settings": {}}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    shutil.copy(peer_process.WORKER, tmp_path / "worker.py")
    (tmp_path / "engine_fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "WORKER", tmp_path / "worker.py")
    with PeerProcess(Path(sys.executable), "fake", timeout_s=20) as process:
        yield process


def test_prints_do_not_get_between_answers(worker):
    assert worker.open(method="plain", **FOLDERS) == "9"
    for _ in range(2):
        completion = worker.generate((5, 6), **RULES)
        assert completion.token_ids == (7, 7, 7, 7)
        assert completion.seconds >= 0
    assert worker.nats((1, 2, 3)) == 1.5
    assert worker.start_s > 0
    # Of the worker alone, and not of this process, which started it.
    assert 1 << 20 < worker.peak_bytes() < 100 << 20


def test_errors_are_answers(worker):
    with pytest.raises(BackendError, match="fake: ValueError: no such method"):
        worker.open(method="broken", **FOLDERS)
    assert worker.open(method="plain", **FOLDERS) == "9"


@pytest.mark.parametrize(
    ("method", "match"),
    [
        ("short", "fake gave 3 tokens where 4 were asked for"),
        ("dies", "fake has ended: out of memory"),
        ("sleeps", r"fake did not answer within 0\.5 s"),
    ],
)
def test_engines_that_fail(worker, method, match):
    worker.open(method=method, **FOLDERS)
    if method == "sleeps":
        worker._timeout_s = 0.5
    with pytest.raises(BackendError, match=match):
        worker.generate((5,), **RULES)


def llama_cpp():
    path = Path(peer_process.__file__).with_name("workers") / "engine_llama_cpp.py"
    spec = importlib.util.spec_from_file_location("engine_llama_cpp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_channels_of_heads_are_reordered_for_the_other_rotation():
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    converted = dict(llama_cpp()._tensors(str(built_in("target")), config))
    small = load_file(built_in("target") / "model.safetensors")
    query = small["model.layers.3.self_attn.q_proj.weight"].float().numpy()
    # In a head of 64 channels, halves (i, i + 32) become neighbours (2 i, 2 i + 1).
    for head, channel in ((0, 0), (1, 5), (3, 31)):
        for half in (0, 1):
            found = converted["blk.3.attn_q.weight"][64 * head + 2 * channel + half]
            assert np.array_equal(found, query[64 * head + channel + 32 * half])
    value = small["model.layers.3.self_attn.v_proj.weight"].float().numpy()
    assert np.array_equal(converted["blk.3.attn_v.weight"], value)
    assert len(converted["token_embd.weight"]) == len(small["model.embed_tokens.weight"]) + 1
    assert not converted["token_embd.weight"][-1].any()


def test_weights_of_four_bits_lie_beside_embeddings_of_eight(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = llama_cpp().converted(str(built_in("target")), str(tmp_path), "q4_1")
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_1"
    assert kinds["token_embd.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    assert path.endswith("-q4_1.gguf")


def generated(engine, method, work, *, length, settings=None):
    """A greedy text of the built-in pair, by an engine in its own process."""
    folders = {name: str(built_in(name)) for name in ("target", "draft")}
    with PeerProcess(Path(sys.executable), engine) as process:
        process.open(**folders, work=str(work), threads=1, method=method, settings=settings or {})
        prompt = (340, 1204, 290, 262)
        return process.generate(prompt, max_new_tokens=length, temperature=0, seed=0).token_ids


@pytest.mark.slow
def test_ours_and_transformers_give_one_greedy_text(tmp_path):
    texts = {generated("monge", "eager", tmp_path, length=24)}
    for method, settings in (
        ("plain", {}),
        ("draft", {"num_assistant_tokens": 3}),
        ("lookup", {"prompt_lookup_num_tokens": 3}),
    ):
        texts.add(generated("transformers", method, tmp_path, length=24, settings=settings))
    assert len(texts) == 1, texts
