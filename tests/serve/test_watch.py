"""An engine that hangs, always fails or has ended is told from a healthy one, and holds no client."""

import re
import signal
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest

from monge.serve import run
from monge.serve import scheduler as scheduling
from monge.serve.scheduler import Scheduler
from tests.serve.hung import hanging
from tests.serve.process import told_address
from tests.serve.served import live, toy_app, wait_for
from tests.serve.toy import VOCAB, Gate, Oops, decoder, generation

POISON = VOCAB - 1


def test_deadlines_hold_while_a_round_hangs(monkeypatch):
    with Scheduler(decoder(), max_batch_size=1) as scheduler:
        gate = Gate()
        running = scheduler.submit(generation(1, deadline_s=600, processors=(gate,)))
        waiting = scheduler.submit(generation(1, deadline_s=600))
        patient = scheduler.submit(generation(1))
        assert gate.reached.wait(60)
        scheduler.check()
        assert not running._events
        monkeypatch.setattr(scheduling, "_LATE_S", -1000.0)  # as if so much time had passed
        scheduler.check()
        for handle in (running, waiting):
            assert handle.completion(0).finish_reason == "deadline"
        gate.opened.set()
        assert patient.completion(60).finish_reason == "length"
        state = scheduler.snapshot()
        assert state.finished == {"deadline": 2, "length": 1}
        assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (0, 0, 0)


def test_a_round_that_takes_too_long_is_a_failure_until_it_ends():
    with Scheduler(decoder(), round_timeout_s=0.01) as scheduler:
        gate = Gate()
        handle = scheduler.submit(generation(1, processors=(gate,)))
        assert gate.reached.wait(60)
        wait_for(lambda: scheduler.snapshot().failure)
        assert scheduler.snapshot().failure == "a round has taken longer than 0.01 s"
        gate.opened.set()
        assert handle.completion(60).finish_reason == "length"
        wait_for(lambda: scheduler.snapshot().failure is None)


def test_requests_that_all_fail_are_a_failure_of_the_engine_and_one_request_is_not():
    whole = decoder()
    whole.components.target.nan.add(POISON)
    with Scheduler(whole) as scheduler:

        def fail(count, *, together):
            made = [generation(POISON, seed=seed) for seed in range(count)]
            groups = [made] if together else [[one] for one in made]
            for group in groups:
                for handle in scheduler.submit_all(group):
                    assert handle.completion(60).finish_reason == "error"

        fail(32, together=True)
        assert scheduler.snapshot().failure is None
        assert scheduler.submit(generation(1)).completion(60).finish_reason == "length"
        fail(7, together=False)
        assert scheduler.snapshot().failure is None
        fail(1, together=False)
        assert scheduler.snapshot().failure == "the last 8 requests all ended in errors"
        assert scheduler.submit(generation(1)).completion(60).finish_reason == "length"
        assert scheduler.snapshot().failure is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [Oops, SystemExit])
def test_a_decoding_thread_that_ends_is_a_failure_with_a_traceback(caplog, error):
    def broken(measure, value):
        raise error("the sink is clogged")

    scheduler = Scheduler(decoder(), sink=broken)
    handle = scheduler.submit(generation(1))
    scheduler.start()
    assert handle.completion(60).finish_reason == "error"
    assert scheduler.snapshot().failure is not None
    assert not scheduler.snapshot().is_open
    (record,) = [one for one in caplog.records if one.name.startswith("monge")]
    assert record.getMessage() == "the decoding thread has ended"
    assert record.exc_info is not None
    scheduler.close()


def test_a_scheduler_that_hangs_is_closed_and_tells_its_clients(monkeypatch, caplog):
    monkeypatch.setattr(scheduling, "_LAST_ROUND_S", 0.01)
    scheduler = Scheduler(decoder(), max_batch_size=1)
    scheduler.start()
    gate = Gate()
    handles = [scheduler.submit(generation(1, processors=(gate,))) for _ in range(2)]
    assert gate.reached.wait(60)
    scheduler.close(drain=True, timeout_s=0.01)
    assert [handle.completion(0).finish_reason for handle in handles] == ["cancelled"] * 2
    assert "the decoding thread hangs; 2 generations are given up" in caplog.text
    gate.opened.set()
    scheduler._thread.join(60)
    assert scheduler._decoder.components.target.open_sequences == 0


def test_clients_of_a_target_that_hangs_get_a_504_and_probes_a_503(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATE_S", 0.0)
    table, whole = hanging()
    app = toy_app(whole, settings={"request_timeout_s": 0.1}, round_timeout_s=0.2)
    with live(app) as url:
        try:
            body = {"prompt": "a", "max_tokens": 2}
            whole_answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            stream = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)
            assert whole_answer.status_code == 504
            assert '"code":"request_timeout"' in stream.text
            for path in ("/health", "/ready"):
                wait_for(lambda: httpx.get(f"{url}{path}").status_code == 503)  # noqa: B023
        finally:
            table.opened.set()
        for path in ("/health", "/ready"):
            wait_for(lambda: httpx.get(f"{url}{path}").status_code == 200)  # noqa: B023


@contextmanager
def running(**options):
    """A server in a thread, and its address; whoever uses it must end it."""
    listener = run.listen("127.0.0.1", 0)
    url = run.url_of(listener)
    server = run.server_of(toy_app(), drain_s=0, log_level="critical", **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_for(lambda: server.started)
    yield server, url
    thread.join(60)
    assert not thread.is_alive()


def test_a_lame_duck_serves_on_and_is_not_ready():
    with running(lame_duck_s=600) as (server, url):
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/health").status_code == 200
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        server.handle_exit(signal.SIGINT, None)  # ends it at once


def test_a_server_that_does_not_end_is_ended(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(run, "_exit", ended.set)
    monkeypatch.setattr(run, "_HUNG_S", -run._TELL_S)  # no patience
    with running(exits=True) as (server, _):
        assert not ended.is_set()
        server.handle_exit(signal.SIGTERM, None)
        assert ended.wait(60)


@pytest.mark.slow
def test_a_process_whose_target_hangs_says_so_and_ends():
    with told_address([sys.executable, "-m", "tests.serve.hung"]) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.status_code == 504
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.terminate()
        log = process.communicate(timeout=60)[1]
    assert re.search(
        r"^\d{4}-\d\d-\d\d \S+ ERROR monge\.serve\.app: not serving: a round", log, re.M
    )
