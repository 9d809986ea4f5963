"""What a server sends to its page: its files, and rounds beside the text."""

import json

import pytest
from fastapi.testclient import TestClient

from monge.page.files import FILES
from tests.serve.served import toy_app, toy_decoder

START = {"max_tokens": 30, "seed": 1, "trace": True}
BODIES = {
    "/v1/completions": START | {"prompt": "once upon"},
    "/v1/chat/completions": START | {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(), raise_server_exceptions=False) as made:
        yield made


def timeless(rounds):
    times = dict.fromkeys(("seconds", "stages"))
    return [one | times for one in rounds]


@pytest.mark.parametrize("path", BODIES)
def test_rounds_come_with_the_text_and_change_nothing(client, path):
    body = BODIES[path]
    (whole,) = client.post(path, json=body).json()["choices"]
    (plain,) = client.post(path, json=body | {"trace": False}).json()["choices"]
    rounds = whole.pop("rounds")
    assert whole == plain
    answer = client.post(path, json=body | {"stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    streamed = [one for chunk in chunks for one in chunk["choices"][0].get("rounds", [])]
    assert timeless(streamed) == timeless(rounds)
    texts = "".join(token["text"] for one in rounds for token in one["tokens"])
    assert texts == (plain["message"]["content"] if "message" in plain else plain["text"])
    assert any(one["path"] for one in rounds)


def test_every_choice_has_its_rounds(client):
    body = START | {"prompt": ["once", "twice"], "n": 2, "max_tokens": 5}
    for choice in client.post("/v1/completions", json=body).json()["choices"]:
        assert sum(len(one["tokens"]) for one in choice["rounds"]) == 5
    body = START | {"prompt": "a", "max_tokens": 0, "echo": True}
    (hidden,) = client.post("/v1/completions", json=body).json()["choices"]
    assert hidden["rounds"] == []


def test_a_trace_is_bounded(monkeypatch):
    monkeypatch.setattr("monge.serve.api.request_parser._MOST_SCORES", 100)
    with TestClient(toy_app()) as client:
        body = START | {"prompt": "a", "max_tokens": 26}
        error = client.post("/v1/completions", json=body).json()["error"]
        assert error["param"] == "trace"
        assert "= 104; this server gives at most 100" in error["message"]
        small = client.post("/v1/completions", json=body | {"max_tokens": 25})
        narrow = client.post("/v1/completions", json=body | {"speculation": {"max_nodes": 1}})
        free = client.post("/v1/completions", json=body | {"trace": None})
        assert [one.status_code for one in (small, narrow, free)] == [200, 200, 200]


def test_files_need_no_key_and_load_nothing_from_elsewhere():
    app = toy_app(toy_decoder(), api_keys=("secret",), allowed_hosts=("testserver",))
    with TestClient(app) as client:
        for path, (_, kind) in FILES.items():
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
            assert "unsafe" not in str(policy)
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "http" not in text.replace(r"https?:\/\/", ""), "which finds links in answers"
            assert "innerHTML" not in answer.text
            assert client.get(path, headers={"host": "evil.example"}).status_code == 403
        assert client.get("/page/run.html").status_code == 401
        assert client.get("/v1/models").status_code == 401
