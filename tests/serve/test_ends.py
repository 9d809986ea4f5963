"""Requests that do not end by themselves: the server stops, time is over, the client leaves, the engine hangs."""

import gc
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from monge.options import ServeOptions
from monge.serve import run
from monge.serve.scheduling import scheduler as scheduling
from monge.serve.scheduling.scheduler import Scheduler
from tests.serve.hung import hanging
from tests.serve.served import LONG, is_refused, live, slow_decoder, toy_app, wait_for
from tests.serve.toy import VOCAB, Gate, Oops, decoder, generation, submit, submit_all

POISON = VOCAB - 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_late_request_is_ended(caplog, count):
    app = toy_app(slow_decoder(), request_timeout_s=0.2)
    with live(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json=LONG | {"n": count}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        wait_for(lambda: app.state.snapshot().kv_used_tokens == 0)
        assert app.state.snapshot().finished == {"deadline": count}
    gc.collect()
    assert not caplog.records, "time that is over is no error of the server"


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": True, "n": 2}])
def test_a_client_that_leaves_is_not_decoded_for_and_is_no_error(caplog, fields):
    app = toy_app(slow_decoder())
    with live(app) as url:
        body = json.dumps(LONG | fields)
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        address = urlsplit(url).hostname, urlsplit(url).port
        with socket.create_connection(address) as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            wait_for(lambda: app.state.snapshot().num_running == 2)
        wait_for(lambda: app.state.snapshot().finished.get("cancelled") == 2)
    gc.collect()
    assert not caplog.records


def test_deadlines_hold_while_a_round_hangs(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATE_S", 0.0)
    with Scheduler(decoder(max_batch_size=1)) as scheduler:
        gate = Gate()
        running = submit(scheduler, generation(1, processors=(gate,)), deadline_s=1)
        waiting = submit(scheduler, generation(1), deadline_s=1)
        patient = submit(scheduler, generation(1))
        assert gate.reached.wait(60)
        scheduler.check()
        assert running.outputs.empty()
        time.sleep(1.1)  # until the deadlines have passed
        scheduler.check()
        for handle in (running, waiting):
            assert handle.completion(1).finish_reason == "deadline"
        gate.opened.set()
        assert patient.completion(60).finish_reason == "length"
        state = scheduler.snapshot()
        assert state.finished == {"deadline": 2, "length": 1}
        assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (0, 0, 0)
        assert running.outputs.empty(), "nothing comes after the end"


def test_requests_that_all_fail_are_a_failure_of_the_engine_and_one_request_is_not():
    whole = decoder()
    whole.components.target.nan.add(POISON)
    with Scheduler(whole) as scheduler:

        def fail(count, *, together):
            made = [generation(POISON, seed=seed) for seed in range(count)]
            for group in [made] if together else [[one] for one in made]:
                for handle in submit_all(scheduler, group):
                    assert handle.completion(60).finish_reason == "error"

        fail(32, together=True)
        assert scheduler.snapshot().failure is None
        assert submit(scheduler, generation(1)).completion(60).finish_reason == "length"
        fail(7, together=False)
        assert scheduler.snapshot().failure is None
        fail(1, together=False)
        assert scheduler.snapshot().failure == "the last 8 requests all ended in errors"
        assert submit(scheduler, generation(1)).completion(60).finish_reason == "length"
        assert scheduler.snapshot().failure is None


@pytest.mark.parametrize("error", [Oops, SystemExit])
def test_a_decoding_thread_that_ends_is_a_failure_with_a_traceback(caplog, error):
    def broken(measure, value):
        raise error("the sink is clogged")

    scheduler = Scheduler(decoder(max_batch_size=1), sink=broken)
    handles = [submit(scheduler, generation(1, seed=row)) for row in range(3)]
    scheduler.start()
    assert [handle.completion(60).finish_reason for handle in handles] == ["error"] * 3
    assert scheduler.snapshot().failure is not None
    assert not scheduler.snapshot().is_open
    (record,) = [one for one in caplog.records if one.name.startswith("monge")]
    assert record.getMessage() == "the decoding thread has ended"
    assert record.exc_info is not None
    scheduler.close()


def test_a_scheduler_that_hangs_is_closed_and_tells_its_clients(monkeypatch, caplog):
    monkeypatch.setattr(scheduling, "_LAST_ROUND_S", 0.01)
    scheduler = Scheduler(decoder(max_batch_size=1))
    scheduler.start()
    gate = Gate()
    handles = [submit(scheduler, generation(1, processors=(gate,))) for _ in range(2)]
    assert gate.reached.wait(60)
    scheduler.close(finish=True, timeout_s=0.01)
    assert [handle.completion(1).finish_reason for handle in handles] == ["cancelled"] * 2
    assert "the decoding thread hangs; 2 generations are given up" in caplog.text
    gate.opened.set()
    scheduler._thread.join(60)
    assert scheduler._decoder.components.target.open_sequences == 0


def test_clients_of_a_target_that_hangs_get_a_504_and_probes_a_503(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATE_S", 0.0)
    table, whole = hanging()
    app = toy_app(whole, request_timeout_s=0.1, round_timeout_s=0.2)

    def probes(status):
        wait_for(lambda: all(httpx.get(f"{url}/{one}").status_code == status for one in paths))

    paths, body = ("health", "ready"), {"prompt": "a", "max_tokens": 2}
    with live(app) as url:
        try:
            whole_answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            stream = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)
            assert whole_answer.status_code == 504
            assert '"code":"request_timeout"' in stream.text
            probes(503)
        finally:
            table.opened.set()
        probes(200)


@contextmanager
def running(app, *, shutdown_delay_s=0, exits=False):
    """A server in a thread, and its address; whoever uses it must end it."""
    listener = run.listen("127.0.0.1", 0)
    options = ServeOptions(graceful_timeout_s=0, shutdown_delay_s=shutdown_delay_s)
    server = run.GracefulServer(app, options, exits=exits, log_level="critical")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    url = run.url_of(listener)
    thread.start()
    wait_for(lambda: server.started)
    yield server, url
    thread.join(60)
    assert not thread.is_alive()


def test_a_server_that_stops_tells_those_whom_it_ends(caplog):
    app = toy_app(slow_decoder())
    with running(app) as (server, url), ThreadPoolExecutor(3) as pool, httpx.Client() as idle:

        def ask(**fields):
            return pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | fields, timeout=60)

        idle.get(f"{url}/health")
        plain, several, stream = ask(), ask(n=2), ask(stream=True)
        wait_for(lambda: app.state.snapshot().num_running == 4)
        server.handle_exit(signal.SIGTERM, None)
        *_, event, done = [part for part in stream.result().text.split("\n\n") if part]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        for answer in (plain.result(), several.result()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        wait_for(lambda: is_refused(url))
        with pytest.raises(httpx.TransportError):
            idle.get(f"{url}/health")
    assert not caplog.records


def test_a_server_serves_on_in_its_shutdown_delay_and_is_not_ready():
    with running(toy_app(), shutdown_delay_s=600) as (server, url):
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
    with running(toy_app(), exits=True) as (server, _):
        assert not ended.is_set()
        server.handle_exit(signal.SIGTERM, None)
        assert ended.wait(60)
