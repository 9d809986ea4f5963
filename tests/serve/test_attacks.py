"""Clients that mean harm: the server answers others meanwhile, and what one request may cost is bounded."""

import asyncio
import difflib
import json
import logging
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import h11
import httpx
import pytest
from fastapi.responses import Response
from fastapi.testclient import TestClient
from pydantic import ValidationError

from monge.requests.chat_format import InstructionFormat
from monge.serve.api.bodies import checked
from monge.serve.api.fields import MAX_MESSAGES
from monge.serve.api.schemas import ChatRequest, CompletionRequest
from monge.serve.http import app as application
from monge.serve.http.connections import ConnectionLimits, log_exhaustion, raise_descriptor_limit
from monge.serve.observe.logs import RateLimited
from tests.serve.process import served
from tests.serve.served import (
    ALPHABET,
    CONTEXT,
    LONG,
    Letters,
    live,
    slow_decoder,
    toy_app,
    toy_decoder,
    wait_for,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TURN = {"role": "user", "content": "a"}
MANY = 20_000
KEYS = {f"{number:x}": 1 for number in range(MANY)}
BODIES = {
    "messages that are none": {"messages": [1] * MANY},
    "messages without fields": {"messages": [{}] * MANY},
    "many messages": {"messages": [TURN] * MANY},
    "parts that are none": {"messages": [{"role": "user", "content": [1] * MANY}]},
    "parts of many messages": {"messages": [{"role": "user", "content": [{}] * 100}] * 200},
    "a few messages that are none": {"messages": [1] * (MAX_MESSAGES - 1)},
    "unknown fields": {"prompt": "a"} | KEYS,
    "unknown fields of a message": {"messages": [TURN | KEYS]},
    "unknown fields of options": {"prompt": "a", "speculation": KEYS},
    "a long unknown field": {"prompt": "a", "k" * MANY: 1},
    "biases": {"prompt": "a", "logit_bias": dict.fromkeys(KEYS, 1.0)},
    "biases that are none": {"prompt": "a", "logit_bias": dict.fromkeys(KEYS, "")},
    "labels": {"messages": [TURN], "metadata": KEYS},
    "stops": {"prompt": "a", "stop": ["b"] * MANY},
    "stops that are none": {"prompt": "a", "stop": [1] * MANY},
    "prompts": {"prompt": ["a"] * MANY},
    "prompts that are none": {"prompt": [{}] * MANY},
    "tools": {"messages": [TURN], "tools": [{}] * MANY},
    "no object": [{}] * MANY,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_causes_few_errors_and_looks_for_few_names(client, name, monkeypatch):
    body, looked, matches = BODIES[name], [], difflib.get_close_matches
    with pytest.raises(ValidationError) as caught:
        (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
    assert caught.value.error_count() <= 20
    noted = lambda *given, **how: looked.append(1) or matches(*given, **how)  # noqa: E731
    monkeypatch.setattr(difflib, "get_close_matches", noted)
    answer = client.post(CHAT if "messages" in body else COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert len(looked) <= 20
    assert len(answer.content) < 1000, "an answer repeats little"


ITEMS = {
    "names": '{"prompt": "a"' + "".join(f', "{number}" : 1' for number in range(200_000)) + "}",
    "texts": '{"prompt": [' + ",".join([r'"\\"'] * 200_000) + "]}",
    "lists": '{"prompt": [' + ",".join(["[]"] * 200_000) + "]}",
    "objects": '{"prompt": ["\\\\", ' + ",".join(["{}"] * 200_000) + "]}",
    "token ids": '{"prompt": [' + ",".join(["1"] * 600_000) + "]}",
}


@pytest.mark.parametrize("content", ITEMS.values(), ids=ITEMS)
def test_a_body_of_too_many_items_is_not_even_parsed(client, monkeypatch, content):
    seen, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda content: seen.append(1) or loads(content))
    answer = client.post(COMPLETIONS, content=content, headers=JSON)
    assert answer.status_code == 400
    assert seen == []
    assert "the body has more than" in answer.json()["error"]["message"]


def test_punctuation_inside_of_texts_does_not_count_and_the_largest_conversation_passes():
    text = '[{",\\' * 200_000
    assert checked(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == (text,)
    texts = ['"', "\\", '\\"', '[{"a": "b"}, ' * 10]
    parts = [{"type": "text", "text": texts[number % 4]} for number in range(MAX_MESSAGES // 2)]
    messages = [{"role": "user", "content": [part, part]} for part in parts]
    messages += [TURN] * (MAX_MESSAGES // 2)
    body = checked(json.dumps({"messages": messages}).encode(), ChatRequest)
    assert [one.text for one in body.messages[:4]] == [f"{text}\n{text}" for text in texts]


EXTREMES = {
    "temperature": [5e-324, 1e-300, 1e-38, 1e38, 1e300],
    "top_p": [5e-324, 1e-300],
    "min_p": [5e-324, 1],
    "top_k": [1, 2**31 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 10, 5e-324, 1e-300, 1e-38, 1e-3],
    "logit_bias": [{"0": 100}, {str(token): -100 for token in range(len(ALPHABET))}],
    "max_tokens": [0, 2**31, 2**63, 10**30, 1e300],
    "seed": [2**63 - 1, -(2**63), 2**63],
    "n": [2**63],
}


@pytest.mark.parametrize("temperature", [1, 1e-300, 1e300])
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in EXTREMES.items() for value in values]
)
def test_extreme_values_are_served_or_refused(client, name, value, temperature):
    body = {"prompt": "a", "max_tokens": 4, "temperature": temperature} | {name: value}
    answer = client.post(COMPLETIONS, content=json.dumps(body), headers=JSON)
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["param"] == name
    if name == "repetition_penalty" and value < 0.01:  # logits would be infinite
        assert answer.status_code == 400


def connected(url):
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=30)


def is_closed(connection, after=0.0):
    """Whether the other side has closed a connection to which nothing more is sent."""
    connection.settimeout(after)
    try:
        return not connection.recv(65536)
    except (BlockingIOError, TimeoutError):
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(30)


def refuses(connection, sent):
    """Whether the other side takes no more."""
    try:
        connection.sendall(sent)
    except OSError:
        return True
    return False


HASTY = ConnectionLimits(max_connections=100, header_timeout_s=0.2, write_timeout_s=0.2)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: x",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=repr,
)
def test_a_client_that_does_not_finish_what_it_says_is_cut_off(sent, monkeypatch):
    monkeypatch.setattr(application, "_BODY_TIMEOUT_S", 0.2)
    with live(toy_app(), HASTY) as url, connected(url) as connection:
        connection.sendall(sent)
        wait_for(lambda: is_closed(connection, after=0.05))


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_client_that_says_a_little_now_and_then_is_cut_off(is_answered):
    app = toy_app(api_keys=("key",))
    with live(app, HASTY) as url, connected(url) as connection:
        connection.sendall(HEAD.encode())
        if is_answered:  # before the body
            connection.sendall(b"Content-Length: 100000\r\n\r\n")
            assert answer_on(connection).split()[1] == b"401"
        wait_for(lambda: refuses(connection, b"a: b\r\n"))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs a table of connections")
def test_a_client_that_takes_nothing_is_cut_off():
    size, app = 200_000_000, toy_app()

    async def much():
        return Response(b"x" * size)

    app.add_api_route("/much", much)
    with live(app, HASTY) as url, connected(url) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: is_cut_off(url, connection))
        assert httpx.get(f"{url}/health").status_code == 200


def is_cut_off(url, connection):
    """Whether the server's end of a connection is closed, though its client has not read what was sent."""
    ends = f":{urlsplit(url).port:04X}", f":{connection.getsockname()[1]:04X}"
    rows = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()]
    return not any((here[-5:], there[-5:], state) == (*ends, "01") for here, there, state in rows)


def test_an_answered_client_may_take_its_time_for_the_next_request():
    with live(toy_app(), HASTY) as url, httpx.Client(base_url=url) as keeping:
        assert keeping.get("/health").status_code == 200
        time.sleep(0.5)  # longer than any of the times; no synchronisation
        assert keeping.get("/health").status_code == 200


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def chunked(content, size):
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + body + b"0\r\n\r\n"


def answer_on(connection):
    """The first answer with a body, or what comes before the connection is closed."""
    answer = b""
    with suppress(OSError):
        while b"\r\n\r\n{" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer


@pytest.mark.parametrize("has_key", [False, True])
def test_few_chunks_of_a_byte_are_parsed(monkeypatch, has_key):
    """Also those that follow an answer: without a key, it comes before the body."""
    parsed_events, honest = [], h11.Connection.next_event
    noted = lambda self: parsed_events.append(1) or honest(self)  # noqa: E731
    monkeypatch.setattr(h11.Connection, "next_event", noted)
    content = chunked(json.dumps({"prompt": "a" * 100_000}).encode(), 1)
    app = toy_app(api_keys=("key",) if has_key else ())
    with live(app) as url, connected(url) as connection:
        head, end, body = content.partition(b"\r\n\r\n")
        connection.sendall(head + end)
        if has_key:
            assert answer_on(connection).split()[1] == b"401"
        refuses(connection, body)
        answer = answer_on(connection)
        if not has_key:
            assert answer.split()[1] == b"400"
            assert b"chunks of at least a kilobyte" in answer
            assert b'"code":"invalid_http"' in answer
        assert httpx.get(f"{url}/health").status_code == 200
    assert len(parsed_events) < 3000


@pytest.mark.parametrize(("length", "size"), [(200, 1), (100_000, 1000), (100_000, 256)])
def test_reasonable_chunks_are_served(length, size):
    content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a"}).encode().ljust(length)
    with live(toy_app()) as url, connected(url) as connection:
        connection.sendall(chunked(content, size))
        assert answer_on(connection).split()[1] == b"200"


def streamed(stack, url):
    """Lines of a stream that goes on, after its first."""
    stream = httpx.stream("POST", f"{url}{COMPLETIONS}", json=LONG | {"stream": True})
    lines = stack.enter_context(stream).iter_lines()
    next(lines)
    return lines


def test_where_every_connection_is_served_newcomers_get_a_503_and_probes_an_answer():
    limits = ConnectionLimits(max_connections=2, backlog=3, header_timeout_s=600)
    with live(toy_app(slow_decoder()), limits) as url, ExitStack() as stack:
        _streams = [streamed(stack, url) for _ in range(2)]
        newcomers = [stack.enter_context(connected(url)) for _ in range(2)]
        for newcomer in newcomers:
            newcomer.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        for newcomer in newcomers:
            answer = answer_on(newcomer)
            assert answer.split()[1] == b"503"
            assert b'"code":"too_many_connections"' in answer
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{url}{path}", timeout=60).status_code == 200


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(monkeypatch):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    raise_descriptor_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    raise_descriptor_limit()
    assert told == [(1024, 1024)]


def test_connections_are_bounded_and_the_silent_ones_make_room():
    limits = ConnectionLimits(max_connections=8, backlog=4, header_timeout_s=600)
    with live(toy_app(slow_decoder()), limits) as url, ExitStack() as stack:
        lines = streamed(stack, url)
        silent = [stack.enter_context(connected(url)) for _ in range(40)]
        wait_for(lambda: sum(map(is_closed, silent)) >= 32)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        told = [next(lines) for _ in range(20)]
        assert len(told) == 20, "a request that is served keeps its connection"


@pytest.mark.slow
def test_silent_clients_under_a_low_limit_of_descriptors_neither_stop_the_server_nor_fill_its_log():
    with served(descriptors=256) as (process, url), ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(url))
        for _ in range(5):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        stack.close()
        process.terminate()
        log = process.communicate(timeout=60)[1]
    assert len(log.splitlines()) < 10, log[:2000]
    assert log.count("connections are open: those") == 1


def test_running_out_of_descriptors_is_one_line(caplog):
    logger, rate_limited = logging.getLogger("monge.serve.http.connections"), RateLimited()
    logger.addFilter(rate_limited)
    loop = asyncio.new_event_loop()
    try:
        for _ in range(1000):
            log_exhaustion(loop, {"exception": OSError(24, "Too many open files")})
    finally:
        logger.removeFilter(rate_limited)
        loop.close()
    (record,) = caplog.records
    expected = "a connection cannot be taken: Too many open files (told once a minute)"
    assert record.getMessage() == expected


class Spelled(Letters):
    """Says how its tokens are spelled, and notes which texts it was asked for; it may be held."""

    def __init__(self):
        self.seen, self.opened = [], threading.Event()
        self.opened.set()

    def get_vocab(self):
        return {letter: number for number, letter in enumerate(ALPHABET)}

    def __call__(self, text, *, add_special_tokens=True):
        self.seen.append(text)
        assert self.opened.wait(60), "nobody let it go on"
        return super().__call__(text)


def spelled_app(tokenizer, **options):
    decoder = toy_decoder()
    decoder.tokenizer, decoder.chat_format = tokenizer, InstructionFormat(tokenizer)
    return toy_app(decoder, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 1_000_000}),
        (COMPLETIONS, {"prompt": ["a", "a" * (CONTEXT + 1)]}),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}] * 2}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_text_that_can_have_no_room_is_refused_before_it_is_tokenised(path, body):
    tokenizer = Spelled()
    with TestClient(spelled_app(tokenizer)) as client:
        error = client.post(path, json=body).json()["error"]
        assert tokenizer.seen == []
        longest = {"prompt": "a" * (CONTEXT - 1), "max_tokens": 1}
        assert client.post(COMPLETIONS, json=longest).status_code == 200
    assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")
    assert f"context length of {CONTEXT} tokens" in error["message"]


@contextmanager
def held_clerk(**options):
    """A live server whose tokenizer is busy with the text `first`, the tokenizer, and a thread pool for clients."""
    tokenizer = Spelled()
    tokenizer.opened.clear()
    with live(spelled_app(tokenizer, **options)) as url, ThreadPoolExecutor(8) as pool:
        try:
            first = pool.submit(asked, url, "first")
            wait_for(lambda: tokenizer.seen == ["first"])
            yield url, tokenizer, pool, first
        finally:
            tokenizer.opened.set()


def asked(url, prompt):
    return httpx.post(f"{url}{COMPLETIONS}", json={"prompt": prompt, "max_tokens": 2}, timeout=60)


def test_few_requests_wait_to_be_tokenised():
    with held_clerk(max_waiting=2) as (url, tokenizer, pool, first):
        others = [pool.submit(asked, url, "other") for _ in range(4)]
        wait_for(lambda: sum(other.done() for other in others) == 3)
        for answer in (other.result() for other in others if other.done()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert httpx.get(f"{url}/health").status_code == 200
        tokenizer.opened.set()
        statuses = [first.result().status_code, *(other.result().status_code for other in others)]
        assert sorted(statuses) == [200, 200, 429, 429, 429]


def test_a_text_whose_client_left_is_not_tokenised():
    with held_clerk() as (url, tokenizer, pool, first):
        with connected(url) as leaving:
            body = json.dumps({"prompt": "left"})
            leaving.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: 'code="client_left"' in httpx.get(f"{url}/metrics").text)
        last = pool.submit(asked, url, "last")
        tokenizer.opened.set()
        assert first.result().status_code == last.result().status_code == 200
    assert tokenizer.seen == ["first", "last"]


def test_the_time_before_the_queue_counts_towards_the_deadline():
    with held_clerk(request_timeout_s=0.5) as (url, _, pool, first):
        waiting = pool.submit(asked, url, "waiting")
        for answer in (first.result(), waiting.result()):
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "request_timeout"
