"""Keys, sizes, time, and errors that say nothing about the server's inside."""

import asyncio
import logging
import tracemalloc

import pytest
from fastapi.testclient import TestClient

from monge.core.errors import OptionError
from monge.options import ServeOptions
from monge.oracle.tabular import RandomTable, TabularModel
from monge.serve.http.middleware import BoundedBodies
from monge.serve.run import listen
from monge.serve.settings import checked_options, hosts_to_accept
from tests.serve.served import ALPHABET, toy_app, toy_decoder

MIB = 1 << 20
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded():
    with TestClient(toy_app(api_keys=("first", "second"))) as client:
        yield client


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys_opens(guarded, key):
    answer = guarded.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer firs", "Bearer first2"),
        *("Basic first", "first", "Bearer " + "x" * 10_000, "Bearer \xff"),
    ],
    ids=repr,
)
def test_anything_else_does_not(guarded, header):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    paths = ("/v1/models", "/openapi.json", "/nothing")
    answers = [guarded.get(path, headers=headers) for path in paths]
    for answer in (*answers, guarded.post("/v1/completions", json=BODY, headers=headers)):
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "first" not in answer.text


def test_watchers_need_no_key(guarded):
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert guarded.get(path).status_code == 200


def test_large_bodies_are_refused_by_their_length_and_by_their_size(guarded):
    headers = {"authorization": "Bearer first", "content-type": "application/json"}
    for content in (b"x" * (4 * MIB + 1), (b"x" * MIB for _ in range(5))):
        answer = guarded.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert "larger than 4194304 bytes" in answer.json()["error"]["message"]


class Bodies:
    """An application that reads bodies through `BoundedBodies`, and holds its answers until it is opened."""

    def __init__(self, max_bytes, timeout_s=60.0):
        self.statuses, self.read, self.held, self.opened = [], [], [], asyncio.Event()
        limits = {"max_bytes": max_bytes, "max_held_bytes": max_bytes, "timeout_s": timeout_s}
        self.bounded = BoundedBodies(self.app, **limits)

    async def app(self, scope, receive, send):
        del scope["state"]["body"]
        self.held.append(tracemalloc.get_traced_memory()[0])
        self.read.append(scope["path"])
        if scope["path"] == "/parsed":
            scope["state"]["release_body"]()
        await self.opened.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, *sizes, path="/", pause_s=0.0):
        left = list(sizes)

        async def receive():
            await asyncio.sleep(pause_s)
            body = b"x" * left.pop()
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message):
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await self.bounded(scope, receive, send)


def test_slow_bodies_are_refused():
    async def run():
        bodies = Bodies(1000, timeout_s=0.1)
        await bodies.ask(*[1] * 100, pause_s=0.02)
        assert (bodies.statuses, bodies.read) == ([408], [])

    asyncio.run(run())


def test_large_bodies_that_wait_to_be_parsed_share_a_budget():
    """Small ones are taken all the same, and who has parsed one makes room for the next."""

    async def run():
        bodies, asked = Bodies(200_000), []
        parsed, others = [(100_000, "/parsed")] * 3, [(100_000, "/"), (75_000, "/"), (30_000, "/")]
        for number, (half, path) in enumerate(parsed + others):
            asked.append(asyncio.create_task(bodies.ask(half, half, path=path)))
            while len(bodies.read) + len(bodies.statuses) <= number:
                await asyncio.sleep(0)
        assert bodies.read == ["/parsed"] * 3 + ["/"] * 2
        assert bodies.statuses == [429], "the second large one that is not parsed"
        bodies.opened.set()
        await asyncio.gather(*asked)
        await bodies.ask(100_000, 100_000)
        assert bodies.statuses == [429, *[200] * 6]

    asyncio.run(run())


def test_a_body_that_was_read_is_held_by_nobody():
    async def run():
        bodies = Bodies(1 << 20)
        bodies.opened.set()
        await bodies.ask(1_000_000)
        return bodies.held[0]

    tracemalloc.start()
    assert asyncio.run(run()) < 500_000
    tracemalloc.stop()


def test_a_failure_of_ours_has_an_id_and_nothing_else(caplog):
    app = toy_app()

    async def broken() -> None:
        raise RuntimeError("the secret path /etc/weights")

    app.add_api_route("/broken", broken)
    caplog.set_level(logging.ERROR, "monge.serve")
    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "RuntimeError" not in answer.text
    error_id = answer.json()["error"]["message"].split()[2].rstrip(";")
    assert any(error_id in record.getMessage() for record in caplog.records)


class _Poisoned(RandomTable):
    """A table that has no law after the letter z."""

    def __call__(self, token_ids):
        if token_ids[-1] == ALPHABET.index("z"):
            return [float("nan")] * len(ALPHABET)
        return super().__call__(token_ids)


def test_a_request_that_fails_in_the_engine_leaves_the_server_whole(caplog):
    size = len(ALPHABET)
    poisoned = TabularModel(_Poisoned(size, 11), size, max_length=100)
    good_body = {"prompt": "a", "seed": 0, "logit_bias": {str(size - 4): -100}}
    caplog.set_level(logging.ERROR, "monge.serve")
    with TestClient(toy_app(toy_decoder(poisoned))) as client:
        bad = client.post("/v1/completions", json={"prompt": "z"})
        stream = client.post("/v1/completions", json={"prompt": "z", "stream": True})
        assert client.post("/v1/completions", json=good_body).status_code == 200
        assert client.get("/health").status_code == 200
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal_error")
    assert "logits" not in bad.text
    assert '"code":"internal_error"' in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
    logged = [record for record in caplog.records if "logits" in record.getMessage()]
    error_id = bad.json()["error"]["message"].split()[2].rstrip(";")
    assert logged[0].getMessage().split()[1].rstrip(":") == error_id
    assert all(record.exc_info[2] is not None for record in logged), "with its traceback"


HOST = "an allowed host is a name or an address without a port"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"served_model_name": "two words"}, "must be one word"),
        ({"served_model_name": ""}, "must be one word"),
        ({"api_keys": ("",)}, "API key must be printable"),
        ({"api_keys": ("ü",)}, "API key must be printable"),
        ({"allowed_hosts": ("http://a.b",)}, HOST),
        ({"allowed_hosts": ("",)}, HOST),
        ({"allowed_hosts": ("a.b:80",)}, HOST),
        ({"request_timeout_s": -1}, "request_timeout_s must be positive"),
        ({"allowed_origins": ("my.site",)}, "an allowed origin is a scheme and a host"),
        ({"allowed_origins": ("https://my.site/",)}, "an allowed origin is a scheme and a host"),
        ({"ssl_keyfile": "key.pem"}, "TLS needs both"),
        ({"ssl_keyfile": "no", "ssl_certfile": "no"}, "no certificate with its key"),
        ({"root_path": "models"}, "root_path must be a path"),
        ({"root_path": "/models/"}, "root_path must be a path"),
    ],
    ids=str,
)
def test_bad_options_of_a_server_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        checked_options(ServeOptions(**options))


OWN = (
    *("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000"),
    *("[::1]:8000", "[::1]", "my.machine:80", "localhost.:1"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("127.0.0.2", "", "[::1", "::1"),
)


def test_a_page_that_gave_its_name_our_address_is_refused():
    hosts = hosts_to_accept(ServeOptions(allowed_hosts=("my.machine",)))
    with TestClient(toy_app(allowed_hosts=hosts)) as client:
        for host in OWN:
            answer = client.post("/v1/completions", json=BODY, headers={"host": host})
            assert answer.status_code == 200
        for host in FOREIGN:
            for path in ("/v1/completions", "/health", "/metrics", "/openapi.json", "/nothing"):
                answer = client.post(path, json=BODY, headers={"host": host})
                assert answer.status_code == 403
                error = answer.json()["error"]
                assert error["code"] == "host_not_allowed"
                assert "--allowed-host" in error["message"]


LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}


@pytest.mark.parametrize(
    ("host", "has_keys", "allowed", "expected"),
    [
        ("127.0.0.1", False, (), LOOPBACK),
        ("127.0.0.2", False, (), {*LOOPBACK, "127.0.0.2"}),
        ("::1", False, ("a.b",), {*LOOPBACK, "a.b"}),
        ("localhost", True, (), set()),
        ("0.0.0.0", False, (), set()),
        ("0.0.0.0", False, ("a.b",), {*LOOPBACK, "0.0.0.0", "a.b"}),
    ],
)
def test_names_are_checked_on_loopback_without_a_key_and_where_some_are_allowed(
    host, has_keys, allowed, expected
):
    keys = ("key",) if has_keys else ()
    options = ServeOptions(host=host, api_keys=keys, allowed_hosts=allowed)
    assert set(hosts_to_accept(options)) == expected


def test_a_taken_port_is_said_at_once():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
    with pytest.raises(OptionError, match="cannot listen on no.such.host.invalid"):
        listen("no.such.host.invalid", 0)
