"""Errors name the field that is at fault, as clients wrote it."""

import pytest
from fastapi.testclient import TestClient

from tests.serve.served import CONTEXT, toy_app

TURN = [{"role": "user", "content": "a"}]
LONG = [{"role": "user", "content": "a" * CONTEXT}]


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app()) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": [99]}, "prompt", None),
        ({"logit_bias": {"99": 1}}, "logit_bias", None),
        ({"prompt": "a" * CONTEXT}, "prompt", "context_length_exceeded"),
        ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"stream": False, "stream_options": {}}, "stream_options", None),
        ({"stream": 1, "stream_options": {}}, "stream", None),
        (
            {"speculation": {"controller": "fixed", "adaptive": False}},
            "speculation.controller",
            None,
        ),
    ],
)
def test_of_a_completion(client, fields, param, code):
    error = client.post("/v1/completions", json={"prompt": "a"} | fields).json()["error"]
    assert (error["param"], error["code"]) == (param, code), error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": LONG}, "messages", "context_length_exceeded"),
        ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", None),
        ({"top_logprobs": 3}, "top_logprobs", None),
        ({"logit_bias": {"99": 1}}, "logit_bias", None),
    ],
)
def test_of_a_conversation(client, fields, param, code):
    error = client.post("/v1/chat/completions", json={"messages": TURN} | fields).json()["error"]
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_what_belongs_together_is_taken_together(client):
    stream = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    chat = {
        "messages": TURN,
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert client.post("/v1/completions", json=stream).status_code == 200
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
