"""What a request may say about speculation.

Limits of its trees, and whether the controller plans for it.
"""

import pytest
from fastapi.testclient import TestClient

from monge.core.context import DraftPlan
from monge.serve.scheduler import Scheduler
from monge.serve.schemas import MAX_DRAFT
from tests.serve.served import toy_app, toy_decoder
from tests.serve.toy import alone, decoder, generation, submit

PROMPT = "once upon"
TREE = "fixed_width((2, 1, 1))"


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(toy_decoder(tree=TREE)), raise_server_exceptions=False) as made:
        yield made


def complete(client, **fields):
    answer = client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True} | fields
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def offline(seed, **parts):
    decoder = toy_decoder(**({"tree": TREE} | parts))
    return decoder.generate(PROMPT, max_new_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)[
        0
    ]


@pytest.mark.parametrize(
    ("limits", "controller"),
    [
        ({"max_depth": 1}, "fixed(max_depth=1)"),
        ({"max_nodes": 3}, "fixed(max_nodes=3)"),
        ({"max_depth": 2, "max_nodes": 3, "adaptive": True}, "fixed(max_depth=2, max_nodes=3)"),
        ({"max_depth": MAX_DRAFT}, "fixed"),
        ({}, "fixed"),
    ],
    ids=str,
)
def test_limits_are_those_of_a_controller_that_has_them(client, limits, controller):
    body = complete(client, seed=5, speculation=limits)
    result = offline(5, controller=controller)
    told = body["metrics"]["speculative_decoding"]
    assert body["choices"][0]["text"] == result.text
    assert told["num_draft_tokens"] == sum(record.num_nodes for record in result.records) > 0
    depth = limits.get("max_depth", MAX_DRAFT)
    assert not any(told["acceptance_histogram"][depth + 1 :])


@pytest.mark.parametrize("limits", [{"max_depth": 0}, {"max_nodes": 0, "adaptive": False}], ids=str)
def test_no_room_is_no_speculation(client, limits):
    body, off = (
        complete(client, seed=5, speculation=limits),
        complete(client, seed=5, speculation=False),
    )
    assert body["choices"] == off["choices"]
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_chat_has_them_too(client):
    turns = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "ignore_eos": True,
        "seed": 1,
    }
    told = client.post(
        "/v1/chat/completions", json=turns | {"speculation": {"max_depth": 1}}
    ).json()["metrics"]
    assert told["speculative_decoding"]["acceptance_histogram"][2:] == [0, 0]


def test_without_the_controller_a_seed_has_its_text_under_one_that_rests():
    resting = toy_app(toy_decoder(tree=TREE, controller="fixed(max_depth=0)"))
    with TestClient(resting) as client:
        as_planned = complete(client, seed=3)
        asked = complete(client, seed=3, speculation={"adaptive": False, "max_depth": 2})
    assert as_planned["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert asked["choices"][0]["text"] == offline(3, controller="fixed(max_depth=2)").text
    assert asked["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("speculation", "param", "message"),
    [
        (0, "speculation", "valid boolean"),
        ("fast", "speculation", "valid boolean"),
        ({"max_depth": -1}, "speculation.max_depth", "greater than or equal to 0"),
        (
            {"max_depth": MAX_DRAFT + 1},
            "speculation.max_depth",
            f"less than or equal to {MAX_DRAFT}",
        ),
        ({"max_nodes": 2.0}, "speculation.max_nodes", "valid integer"),
        ({"max_nodes": True}, "speculation.max_nodes", "valid integer"),
        ({"adaptive": "yes"}, "speculation.adaptive", "valid boolean"),
        ({"max_deep": 2}, "speculation.max_deep", "did you mean 'max_depth'?"),
        ({"drafter": "../../etc/passwd"}, "speculation.drafter", "unknown field"),
    ],
    ids=str,
)
def test_refusals_say_why(client, speculation, param, message):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "speculation": speculation})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    )
    assert message in error["message"]
    assert "passwd" not in error["message"]


def test_they_are_counted():
    with TestClient(toy_app()) as client:
        for speculation in (None, True, False, {"max_depth": 1}, {}):
            complete(client, speculation=speculation)
        client.post("/v1/completions", json={"prompt": PROMPT, "speculation": {"max_depth": "1"}})
        lines = client.get("/metrics").text.splitlines()
    counted = {
        line.partition('speculation="')[2]
        for line in lines
        if line.startswith("monge:requests_by_speculation_total{")
    }
    assert counted == {'default"} 2.0', 'off"} 1.0', 'options"} 2.0'}
    (refused,) = [
        line
        for line in lines
        if line.startswith("monge:http_requests_total{") and 'status="400"' in line
    ]
    assert refused.endswith(" 1.0")


def test_neighbours_write_what_they_write_alone():
    options = [
        {},
        {"limits": DraftPlan(max_depth=1)},
        {"adaptive": False, "limits": DraftPlan(max_nodes=2)},
        {"speculative": False},
    ]
    plain = [generation(row % 7, 1, seed=row, tokens=6 + row % 5) for row in range(12)]
    asked = [
        generation(row % 7, 2, seed=row, tokens=6 + row % 5, **options[row % 4])
        for row in range(12)
    ]
    with Scheduler(decoder(tree=TREE), max_batch_size=8) as scheduler:
        handles = [
            submit(scheduler, one) for pair in zip(plain, asked, strict=True) for one in pair
        ]
        texts = [handle.completion(60).token_ids for handle in handles]
    assert texts[::2] == [alone(one, tree=TREE) for one in plain]
    with Scheduler(decoder(tree=TREE), max_batch_size=1) as scheduler:
        assert texts[1::2] == [submit(scheduler, one).completion(60).token_ids for one in asked]
