"""The endpoints on a toy pair: what is answered, what is refused, and that it is what the library itself would write."""

import json

import pytest
from fastapi.testclient import TestClient

from tests.serve.served import CONTEXT, toy_app, toy_decoder

PROMPT = "once upon"
TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client():
    with TestClient(toy_app(), raise_server_exceptions=False) as made:
        yield made


def complete(client, **fields):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(client, **fields):
    answer = client.post(
        "/v1/chat/completions", json={"messages": TURNS, "max_tokens": 12} | fields
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def stream(client, path="/v1/completions", **fields):
    start = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": TURNS}
    return events_of(client.post(path, json=start | {"max_tokens": 12, "stream": True} | fields))


def expected(prompt=PROMPT, **options):
    return toy_decoder().generate(prompt, **({"max_new_tokens": 12, "temperature": 1.0} | options))


SAMPLING = {
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "top_k of all": ({"top_k": -1}, {}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.3}),
    "stop": ({"stop": ["e", "th"]}, {"stop": ["e", "th"]}),
    "ignore_eos": (
        {"ignore_eos": True, "max_tokens": 60},
        {"ignore_eos": True, "max_new_tokens": 60},
    ),
    "eos": ({"max_tokens": 60}, {"max_new_tokens": 60}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize(("sent", "options"), SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_completion_is_the_library_s(client, sent, options, seed):
    (result,) = expected(seed=seed, **options)
    body = complete(client, seed=seed, **sent)
    (choice,) = body["choices"]
    assert choice["text"] == result.text
    assert choice["finish_reason"] == ("length" if result.finish_reason == "length" else "stop")
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": len(result.token_ids),
        "total_tokens": len(PROMPT) + len(result.token_ids),
    }
    assert body["seed"] == seed


@pytest.mark.parametrize(("sent", "options"), SAMPLING.values(), ids=SAMPLING)
def test_a_stream_says_the_same(client, sent, options):
    whole = complete(client, seed=3, **sent)
    chunks = stream(client, seed=3, stream_options={"include_usage": True}, **sent)
    *parts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in parts) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in parts][-1] == whole["choices"][0][
        "finish_reason"
    ]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in parts[:-1])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["metrics"]["speculative_decoding"] == whole["metrics"]["speculative_decoding"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["seed"] for chunk in chunks} == {3}


def test_an_absent_seed_is_drawn_and_reproduces_the_answer(client):
    first = complete(client)
    assert complete(client, seed=first["seed"])["choices"] == first["choices"]
    assert complete(client)["seed"] != first["seed"]


def test_choices_are_the_rows_of_one_call(client):
    results = expected([PROMPT, PROMPT, "other", "other"], seed=5)
    body = complete(client, prompt=[PROMPT, "other"], n=2, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [result.text for result in results]
    assert body["usage"]["prompt_tokens"] == len(PROMPT) + len("other")
    assert body["usage"]["completion_tokens"] == sum(len(result.token_ids) for result in results)
    assert "metrics" not in body
    parts = ["", "", "", ""]
    for chunk in stream(client, prompt=[PROMPT, "other"], n=2, seed=5):
        parts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert parts == [result.text for result in results]


def test_prompts_as_token_ids(client):
    ids = toy_decoder().encode(PROMPT)
    text = complete(client, seed=1)["choices"][0]["text"]
    assert complete(client, prompt=list(ids), seed=1)["choices"][0]["text"] == text
    assert complete(client, prompt=[list(ids)], seed=1)["choices"][0]["text"] == text


def test_chat_is_the_completion_of_the_written_conversation(client):
    prompt = "Instruction: hello\nResponse:"
    (result,) = expected(prompt, seed=2)
    body = chat(client, seed=2)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    assert body["usage"]["prompt_tokens"] == len(prompt)
    first, *rest = stream(client, "/v1/chat/completions", seed=2)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == result.text


def test_a_chat_without_a_limit_may_fill_the_context(client):
    turns = [{"role": "user", "content": "a" * (CONTEXT - 60)}]
    body = client.post(
        "/v1/chat/completions", json={"messages": turns, "seed": 1, "ignore_eos": True}
    ).json()
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_penalties_and_biases_change_the_text(client):
    plain = complete(client, seed=1, max_tokens=40)["choices"][0]["text"]
    for field, value in [
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 3.0),
        ("logit_bias", {"5": 100}),
    ]:
        changed = complete(client, seed=1, max_tokens=40, **{field: value})["choices"][0]["text"]
        assert changed != plain, field
    assert set(complete(client, logit_bias={"5": 100})["choices"][0]["text"]) == {"e"}
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
    }
    assert complete(client, seed=1, max_tokens=40, **neutral)["choices"][0]["text"] == plain


def test_ends_are_held_off_and_added(client):
    ids = toy_decoder().generate([PROMPT], temperature=1, seed=1, max_new_tokens=40)[0].token_ids
    stop = ids[3]
    settings = {"seed": 1, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": [stop]}
    short = complete(client, **settings)
    assert short["usage"]["completion_tokens"] == ids.index(stop) + 1
    assert short["choices"][0]["finish_reason"] == "stop"
    longer = complete(client, **settings, min_tokens=20)
    assert longer["usage"]["completion_tokens"] > 20
    for field, value in {"stop_token_ids": [10**6], "min_tokens": 41}.items():
        answer = client.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 40, field: value}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


def test_speculation_can_be_switched_off_for_a_request(client):
    on = complete(client, temperature=0)
    off = complete(client, temperature=0, speculation=False)
    assert off["choices"][0]["text"] == on["choices"][0]["text"]
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_per_request_figures_keep_the_invariants_that_clients_check(client):
    for seed in range(5):
        body = complete(client, seed=seed, max_tokens=30)
        spec = body["metrics"]["speculative_decoding"]
        histogram = spec["acceptance_histogram"]
        assert len(histogram) == spec["num_spec_tokens"] + 1 == 4
        assert sum(histogram) == spec["num_spec_steps"]
        assert (
            sum(depth * count for depth, count in enumerate(histogram))
            == spec["num_accepted_draft_tokens"]
        )
        assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
        assert (
            spec["mean_acceptance_length"]
            == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
        )
        assert (
            spec["draft_acceptance_rate"]
            == spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"]
        )
        times = body["metrics"]
        assert times["time_to_first_token_ms"] > 0
        assert times["queue_time_ms"] >= 0
        assert times["generation_time_ms"] > 0


def test_usage_in_every_chunk(client):
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert all("usage" not in chunk for chunk in stream(client))


def test_nothing_redirects_to_the_host_that_a_request_names(client):
    answer = client.get("/v1/models/", headers={"host": "evil.example"}, follow_redirects=False)
    assert answer.status_code == 404
    answer = client.get("/health/", headers={"host": "evil.example"}, follow_redirects=False)
    assert answer.status_code == 404


def test_models(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["backend"]) == ("toy", CONTEXT, "eager")
    assert client.get("/v1/models/toy").json() == card
    answer = client.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_health_and_version(client):
    for path in ("/health", "/ready"):
        assert client.get(path).json() == {"status": "ok"}
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert client.get("/version").json()["version"]


JSON = {"content-type": "application/json"}
BROKEN = {
    "no JSON": (b"{", JSON, "not JSON"),
    "empty": (b"", JSON, "the body is empty"),
    "list": (b"[]", JSON, "must be a JSON object"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', JSON, "JSON in UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), JSON, "JSON in UTF-8"),
    "UTF-16 without a mark": ('{"prompt": "a"}'.encode("utf-16-le"), JSON, "JSON"),
    "UTF-32": ('{"prompt": "a"}'.encode("utf-32-be"), JSON, "JSON"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', JSON, "prompt: "),
    "a field named by half a pair": (b'{"prompt": "a", "\\udfff": 1}', JSON, "string"),
    "no content type": (b'{"prompt": "a"}', {}, "has no content-type; send JSON"),
    "compressed": (
        b"\x1f\x8b",
        JSON | {"content-encoding": "gzip"},
        "content-encoding 'gzip' is not supported; send the body uncompressed",
    ),
    "nesting": (b"[" * 60_000, JSON, "JSON in UTF-8"),
    "a number of 5000 digits": (
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        JSON,
        "JSON in UTF-8",
    ),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', JSON, "temperature: "),
    "a form of another site": (
        b'{"prompt": "a"}',
        {"content-type": "text/plain"},
        "content-type application/json",
    ),
}


@pytest.mark.parametrize(("content", "headers", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_bodies(client, content, headers, message):
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        if path == "/v1/completions":
            assert message in error["message"]


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig"])
def test_bodies_in_utf_8(client, coding):
    content = json.dumps({"prompt": "é", "max_tokens": 1}, ensure_ascii=False).encode(coding)
    assert client.post("/v1/completions", content=content, headers=JSON).status_code == 200


HALF = "a\ud83d"
HALVES = {
    "prompt": {"prompt": HALF},
    "prompts": {"prompt": ["a", HALF]},
    "stop": {"stop": [HALF]},
    "model": {"model": HALF},
    "user": {"user": HALF},
    "suffix": {"suffix": HALF},
    "logit_bias": {"logit_bias": {HALF: 1.0}},
    "speculation": {"speculation": {"controller": HALF}},
    "messages": {"messages": [{"role": "user", "content": HALF}]},
    "messages, earlier": {"messages": [{"role": "system", "content": HALF}, *TURNS]},
    "messages, part": {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    "messages, role": {"messages": [{"role": HALF, "content": "a"}]},
    "messages, name": {"messages": [{"role": "user", "content": "a", "name": HALF}]},
    "messages, unknown": {"messages": [{"role": "user", "content": "a", HALF: "a"}]},
    "metadata": {"messages": TURNS, "metadata": {"a": HALF}},
    "safety_identifier": {"messages": TURNS, "safety_identifier": HALF},
    "tools": {"messages": TURNS, "tools": [{"type": "function", "function": {"name": HALF}}]},
}


@pytest.mark.parametrize("name", HALVES)
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(client, name):
    body = HALVES[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = body if "messages" in body or "prompt" in body else {"prompt": "a"} | body
    answer = client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name.partition(",")[0].removesuffix("s"))


def test_whole_pairs_are_text(client):
    content = json.dumps({"messages": [{"role": "user", "content": "😀"}], "max_tokens": 1})
    assert "\\ud83d" in content
    assert client.post("/v1/chat/completions", content=content, headers=JSON).status_code == 200


REFUSED = {
    "unknown model": ({"model": "gpt-4"}, 404, "serves 'toy' and nothing else"),
    "unknown field": ({"temprature": 1}, 400, "did you mean 'temperature'?"),
    "too many choices": ({"n": 33}, 400, "at most 32 completions"),
    "too many choices by prompts": ({"prompt": ["a"] * 17, "n": 2}, 400, "at most 32 completions"),
    "too many stops": ({"stop": list("abcdefghijklmnopq")}, 400, "at most 16 stop strings"),
    "token out of range": ({"prompt": [99]}, 400, "token ids must lie in 0..29; got 99"),
    "bias out of range": ({"logit_bias": {"99": 1}}, 400, "token ids must lie in 0..29; got 99"),
    "empty prompt": ({"prompt": ""}, 400, "the prompt has no tokens"),
    "prompt too long": ({"prompt": "a" * 500}, 400, "prompt of 500 tokens"),
    "too many tokens": ({"max_tokens": 500}, 400, "max_tokens=500"),
    "grammar": (
        {"response_format": {"type": "json_object"}},
        400,
        "response_format: there is no grammar",
    ),
    "best of": ({"best_of": 2}, 400, "best_of: "),
    "suffix": ({"suffix": "end"}, 400, "suffix: "),
}


@pytest.mark.parametrize(("fields", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(client, fields, status, message):
    answer = client.post("/v1/completions", json={"prompt": PROMPT} | fields)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_conversation_that_does_not_fit(client):
    answer = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 500}]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_other_paths_and_methods(client):
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert "error" in client.get("/v1/completions").json()
    assert client.get("/docs").status_code == 404


def test_answers_are_counted_with_bounded_labels():
    with TestClient(toy_app()) as client:
        complete(client)
        client.post("/v1/completions", json={"prompt": "a", "nonsense": 1})
        client.get("/some/path/of/mine")
        lines = [
            line
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("monge:http_requests_total")
        ]
    assert set(lines) == {
        'monge:http_requests_total{code="none",endpoint="/v1/completions",engine="0",status="200"} 1.0',
        'monge:http_requests_total{code="unknown_parameter",endpoint="/v1/completions",engine="0",status="400"} 1.0',
        'monge:http_requests_total{code="none",endpoint="other",engine="0",status="404"} 1.0',
    }


def test_metrics_add_up_to_the_per_request_figures():
    with TestClient(toy_app()) as client:
        bodies = [complete(client, seed=seed, max_tokens=20) for seed in range(6)]
        lines = client.get("/metrics").text.splitlines()
    values = {
        line.split("{")[0]: float(line.split(" ")[1])
        for line in lines
        if "{" in line and "position" not in line
    }
    specs = [body["metrics"]["speculative_decoding"] for body in bodies]
    for field, name in [
        ("num_spec_steps", "num_drafts"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_draft_tokens", "num_accepted_tokens"),
    ]:
        assert values[f"vllm:spec_decode_{name}_total"] == sum(spec[field] for spec in specs)
    by_position = [
        float(line.split(" ")[1])
        for line in lines
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    histograms = [spec["acceptance_histogram"] for spec in specs]
    assert by_position == [sum(sum(one[depth + 1 :]) for one in histograms) for depth in range(3)]
    usages = [body["usage"] for body in bodies]
    assert values["vllm:generation_tokens_total"] == sum(
        usage["completion_tokens"] for usage in usages
    )
    assert values["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert (
        values["vllm:time_to_first_token_seconds_count"]
        == values["vllm:e2e_request_latency_seconds_count"]
        == 6
    )
    assert values["vllm:request_generation_tokens_sum"] == values["vllm:generation_tokens_total"]
