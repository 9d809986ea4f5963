"""Requests that do not end by themselves: the server stops, time is over, the client leaves."""

import gc
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.process import served
from tests.serve.served import LONG, live, slow_decoder, toy_app, wait_for


def test_a_server_that_stops_tells_those_whom_it_ends():
    with (
        served("--drain", "1", "--max-batch-size", "4") as (process, url),
        ThreadPoolExecutor(3) as pool,
    ):

        def ask(**fields):
            body = {"prompt": "The", "max_tokens": 1500, "ignore_eos": True, **fields}
            return pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)

        idle = httpx.Client()
        idle.get(f"{url}/health")
        plain, several, stream = ask(), ask(n=2), ask(stream=True)
        wait_for(lambda: re.search(r"num_requests_running\{.*} 4", idle.get(f"{url}/metrics").text))
        process.send_signal(signal.SIGTERM)
        *_, event, done = [part for part in stream.result().text.split("\n\n") if part]
        assert (json.loads(event.removeprefix("data: "))["error"]["code"], done) == (
            "shutting_down",
            "data: [DONE]",
        )
        for answer in (plain.result(), several.result()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "", (
            "no traceback, and no leak of what was left out of collections"
        )
        with pytest.raises(httpx.TransportError):
            idle.get(f"{url}/health")


@pytest.mark.parametrize("count", [1, 2])
def test_a_late_request_is_ended(caplog, count):
    with live(toy_app(slow_decoder(), settings={"request_timeout_s": 0.2})) as url:
        answer = httpx.post(f"{url}/v1/completions", json=LONG | {"n": count}, timeout=60)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
    gc.collect()
    assert not caplog.records, "time that is over is no error of the server"


def test_a_client_that_leaves_is_no_error(caplog):
    app = toy_app(slow_decoder())
    with live(app) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=LONG | {"n": 2}, timeout=0.3)
        wait_for(lambda: app.state.snapshot().finished.get("cancelled") == 2)
    gc.collect()
    assert not caplog.records
