"""The queue: who may wait is counted by requests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from monge.core.errors import ContextLengthError
from monge.serve.generation import QueueFullError, SchedulerClosedError
from monge.serve.scheduler import Scheduler
from tests.serve.served import LONG, slow_decoder, toy_app, wait_for
from tests.serve.toy import Gate, decoder, generation


def test_a_full_queue_and_a_closed_scheduler_say_so():
    scheduler = Scheduler(decoder(), max_batch_size=1, max_waiting=2)
    with scheduler:
        gate = Gate()
        scheduler.submit(generation(1, processors=(gate,)))
        assert gate.reached.wait(60)
        for _ in range(2):
            scheduler.submit(generation(1))
        with pytest.raises(QueueFullError, match="2 requests are waiting, as many as may"):
            scheduler.submit(generation(1))
        gate.opened.set()
    assert scheduler._decoder.components.target.open_sequences == 0
    with pytest.raises(
        SchedulerClosedError, match="no more generations are taken: the scheduler is closing"
    ):
        scheduler.submit(generation(1))


def test_jobs_that_come_together_wait_as_one_request():
    with Scheduler(decoder(max_length=100), max_batch_size=1, max_waiting=2) as scheduler:
        gate = Gate()
        handles = scheduler.submit_all(
            [generation(1, processors=(gate,)), *(generation(1, seed=seed) for seed in range(4))]
        )
        assert gate.reached.wait(60)
        scheduler.submit(generation(1))
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            scheduler.submit_all([generation(1), generation(2)])
        assert scheduler.snapshot().num_waiting == 5
        gate.opened.set()
        assert [handle.completion(60).finish_reason for handle in handles] == ["length"] * 5
        with pytest.raises(ContextLengthError):
            scheduler.submit_all([generation(1), generation(1, tokens=500)])
        assert scheduler.snapshot().num_waiting == 0, "none of them was to be taken"


def test_a_full_queue_counts_requests():
    app = toy_app(slow_decoder(), max_waiting=1, max_batch_size=1)
    with TestClient(app) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, "/v1/completions", json=LONG | {"n": 3})
        wait_for(lambda: app.state.snapshot().num_waiting == 2)
        answer = client.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
        assert "1 requests are waiting" in answer.json()["error"]["message"]
        app.state.end_generations()
        assert first.result().status_code == 503, (
            "an idle server was to take it, however many completions it asks for"
        )
