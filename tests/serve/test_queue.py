"""The queue: who may wait is counted by requests."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from monge.core.errors import ContextLengthError
from monge.engine.chat_format import InstructionFormat
from monge.serve.generation import QueueFullError, SchedulerClosedError
from monge.serve.request_parser import RequestParser
from monge.serve.scheduled_generation import ScheduledGeneration
from monge.serve.scheduler import Scheduler
from monge.serve.schemas import CompletionRequest
from monge.serve.settings import ServerSettings
from tests.serve.served import LONG, slow_decoder, toy_app, toy_decoder, wait_for
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


def order_of(scheduler, asked):
    """Requests in the order in which their choices are served, one at a time.

    `asked` has a client and a number of choices for each.
    """
    served, handles = [], []

    def marked(name):
        return lambda token_ids, scores: served.append(name) or scores

    with scheduler:
        gate = Gate()
        scheduler.submit(generation(1, tokens=1, processors=(gate,)))
        assert gate.reached.wait(60)
        for name, (client, choices) in asked.items():
            made = [generation(1, tokens=1, processors=(marked(name),)) for _ in range(choices)]
            handles += scheduler.submit_all(made, client=client)
        gate.opened.set()
        for handle in handles:
            handle.completion(60)
    return "".join(served)


def test_requests_of_one_client_take_turns():
    asked = {"a": ("x", 4), "b": ("x", 3), "c": ("x", 1)}
    assert order_of(Scheduler(decoder(), max_batch_size=1), asked) == "abcababa"


def test_clients_take_turns_whatever_each_asks_for():
    asked = {"a": ("x", 3), "b": ("x", 1), "c": ("y", 2), "d": ("z", 1)}
    assert order_of(Scheduler(decoder(), max_batch_size=1), asked) == "acdbcaa"


def test_a_round_looks_at_nothing_that_waits(monkeypatch):
    looked = []
    honest = ScheduledGeneration.is_oversized.fget
    monkeypatch.setattr(
        ScheduledGeneration, "is_oversized", property(lambda one: looked.append(1) or honest(one))
    )
    with Scheduler(decoder(), max_batch_size=1, max_waiting=1000) as scheduler:
        gate = Gate()
        first = scheduler.submit(generation(1, tokens=5, processors=(gate,)))
        assert gate.reached.wait(60)
        many = [scheduler.submit(generation(1, deadline_s=600)) for _ in range(500)]
        gate.opened.set()
        first.completion(60)
        for handle in many:
            handle.cancel()
        assert [handle.completion(60).finish_reason for handle in many].count("cancelled") > 400
    # At most twelve rounds for each that was served, and one running generation in a round.
    assert len(looked) < 20 * (1 + scheduler.snapshot().finished["length"])


def test_choices_of_a_request_share_its_bias():
    bias = {str(token): 1.0 for token in range(5)}
    whole = toy_decoder()
    parser = RequestParser(
        decoder=whole,
        settings=ServerSettings(model_name="toy"),
        chat=InstructionFormat(whole.tokenizer),
        max_sequence_tokens=400,
    )
    body = CompletionRequest.model_validate({"prompt": ["a", "b"], "n": 3, "logit_bias": bias})
    made = parser.parse_completion(body).generations
    assert [one.row for one in made] == list(range(6))
    assert len({id(one.processors[0]) for one in made}) == 2, "one a prompt"
