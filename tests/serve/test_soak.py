"""A server that runs for long leaves nothing behind, and one that dies at once writes the same texts again."""

import gc
import logging
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.networks.hf_tree import HfTreeModel
from monge.options import ServeOptions
from monge.serve.scheduling import scheduler as room
from monge.serve.scheduling.scheduler import Scheduler
from tests.engine.tiny import VOCAB as WORDS
from tests.engine.tiny import network
from tests.serve.process import served
from tests.serve.served import toy_app
from tests.serve.toy import decoder as toy_decoder
from tests.serve.toy import generation, submit

BODY = {"prompt": "The", "max_tokens": 2, "temperature": 0.8, "ignore_eos": True}
CLIENTS = 16


def objects():
    """How many objects of each kind there are."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def check_nothing_is_kept(run, count):
    """A leak keeps an object or more for every request of every run.

    Caches of a bounded size are full after some runs.
    """
    grown = before = Counter[str]()
    for _ in range(6):
        run()
        now = objects()
        grown, before = now - before, now
        if sum(grown.values()) < count / 2:
            return
    pytest.fail(f"a run of {count} requests left {grown.most_common(8)}")


@pytest.mark.usefixtures("unchecked_types")
def test_no_object_outlives_its_generation():
    """Short and long prompts, greedy and sampled texts, plain ones, cancelled ones and ones that fail."""
    llama = network("llama", max_position_embeddings=2048)
    target, draft = HfTreeModel(llama), HfTreeModel(llama)
    parts = make_components(target, draft, tree="chain(3)", controller="fixed")
    count = 48

    def fail(*_):
        raise ValueError("a processor that fails")

    def made(row):
        length = 1500 if row % 16 == 0 else 1 + row % 20
        text = [3 + place * (row + 1) % (WORDS - 3) for place in range(length)]
        options = {"speculative": False} if row % 5 == 0 else {}
        options = {"processors": (fail,)} if row % 12 == 5 else options
        return generation(*text, seed=row, tokens=3, temperature=float(row % 2), **options)

    def run():
        handles = []
        for row in range(count):
            handles.append(submit(scheduler, made(row)))
            if row % 7 == 6:
                handles[-1].cancel()
        for handle in handles:
            handle.completion(300)

    with Scheduler(Decoder(parts, max_batch_size=8), ServeOptions(max_waiting=count)) as scheduler:
        check_nothing_is_kept(run, count)
        finished = scheduler.snapshot().finished
        assert finished["length"] > 0
        assert finished["error"] > 0
        assert not scheduler._leaving
    assert (target.cache_bytes, draft.cache_bytes) == (0, 0)


@pytest.fixture
def no_records():
    """No lines of requests: pytest keeps the records of a running test, whatever level others have set."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unchecked_types", "no_records")
def test_no_object_outlives_its_answer():
    """The same behind the endpoints, with answers, streams and refusals of several kinds, which metrics count."""
    count = 30

    def run():
        for row in range(count):
            prompt = "once upon a time"[: 1 + row % 9]
            body = {"prompt": prompt, "max_tokens": 3, "seed": row % 5, "stream": row % 3 == 0}
            wrong = {8: {"unknown": row}, 9: {"n": 99}}.get(row % 10, {})
            client.post("/v1/completions", json=body | wrong)
            client.get("/metrics")

    with TestClient(toy_app(), raise_server_exceptions=False) as client:
        check_nothing_is_kept(run, count)


def test_a_quiet_scheduler_gives_free_memory_back(monkeypatch):
    given = threading.Event()
    monkeypatch.setattr(room, "trim_heap", given.set)
    with Scheduler(toy_decoder()) as scheduler:
        submit(scheduler, generation(1, 2)).completion(60)
        assert given.wait(60)
        assert submit(scheduler, generation(1, 2)).completion(60).finish_reason == "length"


def quiet_kb(process):
    """Memory that a process holds once it has been idle, and has given free memory back."""
    time.sleep(3)
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_ten_thousand_requests():
    def ask(number):
        drafting = (None, {"controller": "fixed"}, {"max_depth": 1}, False)[number % 4]
        # Among them long prompts, whose caches and activations are to be given back.
        if number % 100 == 99:
            long = {"prompt": [number % 500] * 1900, "speculation": drafting is not False}
            return -1, 0, client.post("/v1/completions", json=BODY | long).status_code, ""
        fields = {"seed": number % 50} | ({} if drafting is None else {"speculation": drafting})
        answer = client.post("/v1/completions", json=BODY | fields)
        return number % 50, number % 4, answer.status_code, answer.json()["choices"][0]["text"]

    options = ("--controller", "fsm", "--controller", "fixed", "--max-batch-size", str(CLIENTS))
    limits = httpx.Limits(max_connections=CLIENTS)
    with (
        served(*options) as (process, url),
        httpx.Client(base_url=url, timeout=120, limits=limits) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        told, sizes = set(), []
        for block in range(10):
            told.update(pool.map(ask, range(1000 * block, 1000 * (block + 1))))
            sizes.append(quiet_kb(process))
        metrics = client.get("/metrics").text
    assert {status for _, _, status, _ in told} == {200}
    # 50 seeds, each asked for in two ways; seed 49 in one, since long prompts take the place of the
    # other.
    assert len(told - {(-1, 0, 200, "")}) == 99, "a seed, asked for in one way, has one text"
    (finished,) = re.findall(r'vllm:request_success_total.*reason="length".* (\S+)\n', metrics)
    assert finished == "10000.0"
    assert sizes[-1] - sizes[1] < 16 * 1024, f"{sizes} kB after every 1000 requests"
