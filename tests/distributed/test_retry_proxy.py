"""The retry proxy, with replicas that answer, break off, or are lost; `test_ray.py` uses real ones."""

import asyncio
import json

import pytest

from monge.distributed import retry_proxy
from monge.distributed.retry_proxy import CONTROLLER_OPTIONS, RetryProxy, middlewares

JSON = [(b"content-type", b"application/json")]
TEXT = [(b"content-type", b"text/plain")]
EVENTS = [(b"content-type", b"text/event-stream")]
BODY = [
    {"type": "http.request", "body": b"one ", "more_body": True},
    {"type": "http.request", "body": b"two"},
]


def head(status, headers):
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(text, *, more=False):
    return {"type": "http.response.body", "body": text, "more_body": more}


WHOLE = (head(200, JSON), part(b'{"text": "whole"}'))


class Proxy:
    """Reads the body and sends what it is told to, one list an attempt, as Ray's does."""

    def __init__(self, *answers):
        self.answers, self.bodies, self.headers = list(answers), [], []

    async def __call__(self, scope, receive, send):
        self.headers.append(list(scope["headers"]))
        scope["headers"].append((b"x-request-id", b"new"))
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(body)
        for message in self.answers.pop(0):
            await send(message)


def ask(proxy, *, path="/v1/completions", messages=BODY):
    """Return status, headers and body that a client gets, and whether the answer has ended."""
    sent, waiting = [], list(messages)

    async def receive():
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": [(b"host", b"x")]}
    asyncio.run(RetryProxy(proxy)(scope, receive, send))
    if not sent:
        return None, {}, b"", False
    (start,) = [message for message in sent if message["type"] == "http.response.start"]
    body = b"".join(message.get("body", b"") for message in sent)
    is_ended = not sent[-1].get("more_body", False)
    return start["status"], dict(start["headers"]), body, is_ended


def test_an_answer_passes():
    proxy = Proxy(WHOLE)
    assert ask(proxy) == (200, dict(JSON), b'{"text": "whole"}', True)
    assert proxy.bodies == [b"one two"]
    error = (head(500, JSON), part(b'{"error": {}}'))
    assert ask(Proxy(error))[::2] == (500, b'{"error": {}}')
    own_page = Proxy([head(503, TEXT), part(b"draining")])
    assert ask(own_page, path="/-/healthz")[::2] == (503, b"draining")


@pytest.mark.parametrize("silence", [[], [head(200, EVENTS)]], ids=["nothing", "a head"])
def test_a_request_whose_replica_is_lost_is_sent_again_as_it_was(silence):
    proxy = Proxy(silence, WHOLE)
    assert ask(proxy)[::2] == (200, b'{"text": "whole"}')
    assert proxy.bodies == [b"one two"] * 2
    assert proxy.headers == [[(b"host", b"x")]] * 2


def test_two_lost_replicas_are_an_error_that_clients_read():
    proxy = Proxy([], [], WHOLE)
    status, headers, body, _ = ask(proxy)
    assert (status, headers[b"retry-after"]) == (503, b"1")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("server_error", "replica_lost")
    assert len(proxy.bodies) == 2


def test_a_stream_that_breaks_off_ends_with_an_error():
    proxy = Proxy([head(200, EVENTS), part(b'data: {"a": 1}\n\ndata: {"b', more=True)])
    status, _, body, is_ended = ask(proxy)
    events = [line for line in body.decode().split("\n\n") if line]
    assert (status, is_ended, len(proxy.bodies)) == (200, True, 1)
    assert events[0] == 'data: {"a": 1}'
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"


def test_any_other_answer_that_breaks_off_stays_broken():
    status, _, body, is_ended = ask(Proxy([head(200, JSON), part(b'{"text": "ha', more=True)]))
    assert (status, body, is_ended) == (200, b'{"text": "ha', False)


@pytest.mark.parametrize(
    ("status", "again"), [(503, b"1"), (429, b"1"), (408, None), (404, None), (502, None)]
)
def test_errors_of_the_proxy_get_the_shape_of_ours(status, again):
    proxy = Proxy([head(status, TEXT), part(b"Request dropped ", more=True), part(b"at 10.0.0.7")])
    told, headers, body, _ = ask(proxy)
    assert (told, headers.get(b"retry-after"), len(proxy.bodies)) == (status, again, 1)
    error = json.loads(body)["error"]
    assert error["code"] == "not_served"
    assert "10.0.0.7" not in error["message"]


def test_a_client_that_has_left_is_not_answered():
    proxy = Proxy([], WHOLE)
    assert ask(proxy, messages=[BODY[0], {"type": "http.disconnect"}])[0] is None
    assert len(proxy.bodies) == 1


def test_a_body_that_is_too_large_to_keep_is_sent_once(monkeypatch):
    monkeypatch.setattr(retry_proxy, "_MAX_KEPT_BYTES", 5)
    proxy = Proxy([], WHOLE)
    assert ask(proxy)[0] == 503
    assert proxy.bodies == [b"one two"]


def test_ray_finds_it():
    variables = CONTROLLER_OPTIONS["runtime_env"]["env_vars"]
    path = variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert path == "monge.distributed.retry_proxy:middlewares"
    assert [one.cls for one in middlewares()] == [RetryProxy]
