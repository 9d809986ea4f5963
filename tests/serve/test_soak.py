"""Thousands of generations leave nothing behind."""

import gc
import threading
import tracemalloc
from collections import Counter

import pytest
from starlette.testclient import TestClient

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.engine.models.hf_tree import HfTreeModel
from monge.serve import scheduler as room
from monge.serve.scheduler import Scheduler
from monge.testing.tabular import RandomTable, TabularModel
from tests.engine.tiny import VOCAB as WORDS
from tests.engine.tiny import network
from tests.serve.served import toy_app
from tests.serve.toy import decoder as toy_decoder
from tests.serve.toy import generation, submit

VOCAB = 7


class Markov(TabularModel):
    """A table of the last token only, so that the table itself stops growing."""

    def __init__(self, seed):
        super().__init__(RandomTable(VOCAB, seed), VOCAB)

    def _logits_after(self, text):
        return super()._logits_after(text[-1:])


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_types")
def test_memory_stays_flat_over_two_thousand_jobs():
    target, draft = Markov(1), Markov(2)
    decoder = Decoder(make_components(target, draft, tree="chain(3)"))

    def submit(scheduler, count):
        handles = [
            submit(scheduler, generation(row % VOCAB, 1, seed=row, tokens=3, temperature=0.0))
            for row in range(count)
        ]
        for row, handle in enumerate(handles):
            if row % 50 == 0:
                handle.cancel()
            assert len(handle.completion(60).token_ids) <= 3

    with Scheduler(decoder, max_batch_size=32, max_waiting=200) as scheduler:
        submit(scheduler, 200)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(9):
            submit(scheduler, 200)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        state = scheduler.snapshot()
        assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (0, 0, 0)
        assert sum(state.finished.values()) == 2000
        assert not scheduler._leaving
    assert not target._committed
    assert not target._nodes
    assert not draft._committed
    assert grown < 100_000, (
        f"{grown} bytes more after 1800 generations: something is kept for every generation"
    )


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
def test_no_object_outlives_its_job():
    """Short and long prompts, greedy and sampled texts, plain ones, cancelled ones and ones that fail."""
    llama = network("llama", max_position_embeddings=2048)
    target, draft = HfTreeModel(llama), HfTreeModel(llama)
    decoder = Decoder(
        make_components(target, draft, tree="chain(3)", controller="fixed"), max_batch_size=8
    )
    count = 48

    def text(row):
        length = 1500 if row % 16 == 0 else 1 + row % 20
        return [3 + place * (row + 1) % (WORDS - 3) for place in range(length)]

    def fail(*_):
        raise ValueError("a processor that fails")

    def run():
        handles = []
        for row in range(count):
            options = (
                {"processors": (fail,)}
                if row % 12 == 5
                else {"speculative": False}
                if row % 5 == 0
                else {}
            )
            made = generation(*text(row), seed=row, tokens=3, temperature=float(row % 2), **options)
            handles.append(submit(scheduler, made))
            if row % 7 == 6:
                handles[-1].cancel()
        for handle in handles:
            handle.completion(300)

    with Scheduler(decoder, max_waiting=count) as scheduler:
        check_nothing_is_kept(run, count)
        finished = scheduler.snapshot().finished
        assert finished["length"] > 0
        assert finished["error"] > 0
    assert (target.cache_bytes, draft.cache_bytes) == (0, 0)


@pytest.mark.usefixtures("unchecked_types")
def test_no_object_outlives_its_answer():
    """The same behind the endpoints, with answers, streams and refusals of several kinds, which metrics count."""
    count = 30

    def run():
        for row in range(count):
            asked = {
                "prompt": "once upon a time"[: 1 + row % 9],
                "max_tokens": 3,
                "seed": row % 5,
                "stream": row % 3 == 0,
            }
            wrong = {"n": 99} if row % 10 == 9 else {"unknown": row} if row % 10 == 8 else {}
            client.post("/v1/completions", json=asked | wrong)
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
