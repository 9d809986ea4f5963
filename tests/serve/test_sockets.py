"""Accepted sockets send at once, and requests that are not well-formed HTTP get an error and the end of their connection."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from monge.serve.http.connections import Connection
from tests.serve.served import live, toy_app

BODY = b'{"prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def test_accepted_sockets_do_not_wait_for_acknowledgements(monkeypatch):
    seen, connection_made = [], Connection.connection_made

    def looking(self, transport):
        connection_made(self, transport)
        accepted = transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", looking)
    with live(toy_app()) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    assert seen
    assert all(seen)


def whole_answer(url, sent):
    """All that the server sends before it closes its end of the connection."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.fixture(scope="module")
def url():
    with live(toy_app()) as address:
        yield address


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\ncontent-length: %d\r\n" % len(CHUNKS),
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Content-Length: +5\r\n",
    ],
    ids=repr,
)
def test_a_request_with_a_doubtful_length_is_refused_and_nothing_behind_it_is_answered(
    url, lengths
):
    answer = whole_answer(url, HEAD + lengths + b"\r\n" + CHUNKS + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "Length beside"),
        (b"hello\r\n\r\n", "illegal request line: 'hello'"),
        (b"\x16\x03\x01\x02\x00\x01", "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", "header line: 'no header'"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 70_000, "Receive buffer too long"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\xff" + b"b" * 5000 + b"\r\n\r\n", "illegal header"),
        (HEAD + b"Content-Length: five\r\n\r\n", "bad Content-Length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfive\r\n", "illegal chunk header: 'five"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_error_says_what_was_malformed(url, sent, fault):
    head, _, body = whole_answer(url, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http"
    assert fault in error["message"]
    assert len(error["message"]) < 300
