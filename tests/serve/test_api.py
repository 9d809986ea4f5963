"""The endpoints on a toy pair: their answers are those of the library, and their refusals name the field."""

import json

import pytest
from fastapi.testclient import TestClient

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel
from tests.serve.served import ALPHABET, CONTEXT, Letters, samples, toy_app, toy_decoder

PROMPT = "once upon"
TURNS = [{"role": "user", "content": "hello"}]
CHAT = {"messages": TURNS}
PATHS = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": CHAT}


def complete(client, path="/v1/completions", **fields):
    answer = client.post(path, json=PATHS[path] | {"max_tokens": 12} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client, path="/v1/completions", **fields):
    body = PATHS[path] | {"max_tokens": 12, "stream": True} | fields
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def expected(prompt=PROMPT, *, max_new_tokens=12, **options):
    options = {"temperature": 1.0} | options
    return toy_decoder().generate(prompt, max_new_tokens=max_new_tokens, **options)


SAMPLING = {
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "greedy": ({"temperature": 0}, {"temperature": 0.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "top_k of all": ({"top_k": -1}, {}),
    "min_p": ({"min_p": 0.3}, {"min_p": 0.3}),
    "stop": ({"stop": ["e", "th"]}, {"stop": ["e", "th"]}),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 60}, {"ignore_eos": True}),
    "eos": ({"max_tokens": 60}, {}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_completion_and_its_stream_are_the_library_s(client, name, seed):
    sent, options = SAMPLING[name]
    (result,) = expected(seed=seed, max_new_tokens=sent.get("max_tokens", 12), **options)
    body = complete(client, seed=seed, **sent)
    (choice,) = body["choices"]
    assert choice["text"] == result.text
    assert choice["finish_reason"] == ("length" if result.finish_reason == "length" else "stop")
    usage, num_prompt, num_generated = body["usage"], len(PROMPT), len(result.token_ids)
    assert usage["prompt_tokens_details"].pop("cache_write_tokens") in {0, num_prompt}
    others = ("reasoning", "audio", "accepted_prediction", "rejected_prediction")
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"text_tokens": num_prompt}
        | dict.fromkeys(("cached_tokens", "audio_tokens", "image_tokens"), 0),
        "completion_tokens_details": {"text_tokens": num_generated}
        | {f"{name}_tokens": 0 for name in others},
    }
    chunks = stream(client, seed=seed, stream_options={"include_usage": True}, **sent)
    *parts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in parts) == result.text
    ends = [chunk["choices"][0]["finish_reason"] for chunk in parts]
    assert ends == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert last["usage"]["prompt_tokens_details"].pop("cache_write_tokens") == 0
    assert (last["choices"], last["usage"]) == ([], usage)
    spec = body["metrics"]["speculative_decoding"]
    assert last["metrics"]["speculative_decoding"] == spec
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {body["seed"], *(chunk["seed"] for chunk in chunks)} == {seed}


def test_an_absent_seed_is_drawn_and_reproduces_the_answer(client):
    first = complete(client)
    assert complete(client, seed=first["seed"])["choices"] == first["choices"]
    assert complete(client)["seed"] != first["seed"]


def test_choices_are_the_rows_of_one_call(client):
    results = expected([PROMPT, PROMPT, "other", "other"], seed=5)
    fields = {"prompt": [PROMPT, "other"], "n": 2, "seed": 5}
    body = complete(client, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [result.text for result in results]
    assert body["usage"]["prompt_tokens"] == len(PROMPT) + len("other")
    assert body["usage"]["completion_tokens"] == sum(len(result.token_ids) for result in results)
    assert "metrics" not in body
    parts = ["", "", "", ""]
    for chunk in stream(client, **fields):
        parts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert parts == [result.text for result in results]


def test_prompts_as_token_ids(client):
    ids = list(toy_decoder().encode(PROMPT))
    texts = [complete(client, prompt=one, seed=1)["choices"] for one in (PROMPT, ids, [ids])]
    assert texts[0] == texts[1] == texts[2]


def test_chat_is_the_completion_of_the_written_conversation(client):
    prompt, path = "Instruction: hello\nResponse:", "/v1/chat/completions"
    (result,) = expected(prompt, seed=2)
    body = complete(client, path, seed=2)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    assert body["usage"]["prompt_tokens"] == len(prompt)
    first, *rest = stream(client, path, seed=2)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == result.text


def test_a_chat_without_a_limit_may_fill_the_context(client):
    turns = [{"role": "user", "content": "a" * (CONTEXT - 60)}]
    fields = {"messages": turns, "seed": 1, "ignore_eos": True, "max_tokens": None}
    body = complete(client, "/v1/chat/completions", **fields)
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_penalties_and_biases_change_the_text(client):
    def text(**fields):
        return complete(client, seed=1, max_tokens=40, **fields)["choices"][0]["text"]

    plain, bias = text(), {"logit_bias": {"5": 100}}
    for field in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3}):
        assert text(**field) != plain
    assert set(text(**bias)) == {"e"}
    none = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    assert text(**none, logit_bias={}) == plain


def test_ends_are_held_off_and_added(client):
    ids = toy_decoder().generate([PROMPT], temperature=1, seed=1, max_new_tokens=40)[0].token_ids
    fields = {"seed": 1, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": [ids[3]]}
    short = complete(client, **fields)
    assert short["usage"]["completion_tokens"] == ids.index(ids[3]) + 1
    assert short["choices"][0]["finish_reason"] == "stop"
    assert complete(client, **fields, min_tokens=20)["usage"]["completion_tokens"] > 20


def test_speculation_can_be_switched_off_for_a_request(client):
    on, off = complete(client, temperature=0), complete(client, temperature=0, speculation=False)
    assert off["choices"][0]["text"] == on["choices"][0]["text"]
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_figures_of_requests_are_consistent_and_add_up_to_the_metrics():
    with TestClient(toy_app()) as client:
        bodies = [complete(client, seed=seed, max_tokens=20) for seed in range(6)]
        text = client.get("/metrics").text
    values = {one.name: one.value for one in samples(text)}
    specs = [body["metrics"]["speculative_decoding"] for body in bodies]
    for body, spec in zip(bodies, specs, strict=True):
        histogram, accepted = spec["acceptance_histogram"], spec["num_accepted_draft_tokens"]
        assert len(histogram) == spec["num_spec_tokens"] + 1
        assert spec["mean_acceptance_length"] == 1 + accepted / spec["num_spec_steps"]
        assert spec["draft_acceptance_rate"] == accepted / spec["num_draft_tokens"] <= 1
        for name in ("time_to_first_token_ms", "queue_time_ms", "generation_time_ms"):
            assert body["metrics"][name] > 0
    fields = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for field, name in zip(fields, names, strict=True):
        assert values[f"vllm:spec_decode_{name}_total"] == sum(spec[field] for spec in specs)
    for field, name in (("completion_tokens", "generation"), ("prompt_tokens", "prompt")):
        total = sum(body["usage"][field] for body in bodies)
        assert values[f"vllm:{name}_tokens_total"] == total
        assert values[f"vllm:request_{name}_tokens_sum"] == total
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert values[f"vllm:{name}_seconds_count"] == 6
    assert (
        values["vllm:inter_token_latency_seconds_count"] == values["monge:target_rounds_total"] - 6
    )
    # The last token of every prompt is read in its first round, with the tree.
    read = values["vllm:prompt_tokens_total"] + values["vllm:generation_tokens_total"] - 6
    assert values["vllm:iteration_tokens_total_sum"] == read


def test_usage_in_every_chunk(client):
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert all("usage" not in chunk for chunk in stream(client))


def test_models_health_and_version(client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["backend"]) == ("toy", CONTEXT, "eager")
    assert client.get("/v1/models/toy").json() == card
    answer = client.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for path in ("/health", "/ready"):
        assert client.get(path).json() == {"status": "ok"}
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert client.get("/version").json()["version"]


def test_unknown_paths_and_methods_are_refused_without_redirects(client):
    assert client.get("/v1/completions").status_code == 405
    assert "error" in client.get("/v1/completions").json()
    for path in ("/v1/nothing", "/docs", "/v1/models/", "/health/"):
        answer = client.get(path, headers={"host": "evil.example"}, follow_redirects=False)
        assert answer.status_code == 404, "nothing redirects to the host that a request names"


JSON = {"content-type": "application/json"}
COMPRESSED = JSON | {"content-encoding": "gzip"}
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
    "compressed": (b"\x1f\x8b", COMPRESSED, "'gzip' is not supported; send the body uncompressed"),
    "nesting": (b"[" * 60_000, JSON, "JSON in UTF-8"),
    "a number of 5000 digits": (b'{"prompt": ' + b"9" * 5000 + b"}", JSON, "JSON in UTF-8"),
    "closed brackets": (b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", JSON, "JSON in"),
    "nested objects": (b'{"a":' * 60_000 + b"1" + b"}" * 60_000, JSON, "JSON in UTF-8"),
    "infinity": (b'{"prompt": "a", "temperature": 1e400}', JSON, "temperature: "),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', JSON, "temperature: "),
    "a form of another site": (b"{}", {"content-type": "text/plain"}, "content-type application"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bodies_that_are_no_json_objects_are_refused(client, name):
    content, headers, message = BROKEN[name]
    for path in PATHS:
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(answer.content) < 1000
        assert message in error["message"] or path != "/v1/completions"


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig"])
def test_bodies_in_utf_8(client, coding):
    content = json.dumps({"prompt": "é", "max_tokens": 1}, ensure_ascii=False).encode(coding)
    assert client.post("/v1/completions", content=content, headers=JSON).status_code == 200
    content = json.dumps({"messages": [{"role": "user", "content": "😀"}], "max_tokens": 1})
    assert "\\ud83d" in content, "a whole pair is text"
    assert client.post("/v1/chat/completions", content=content, headers=JSON).status_code == 200


HALF = "a\ud83d"
HALVES = [
    {"prompt": ["a", HALF]},
    {"model": HALF},
    {"logit_bias": {HALF: 1.0}},
    {"speculation": {"controller": HALF}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    {"messages": [{"role": HALF, "content": "a"}]},
    {"messages": [{"role": "user", "content": "a", HALF: "a"}]},
    {"metadata": {"a": HALF}, "messages": TURNS},
    {"tools": [{"type": "function", "function": {"name": HALF}}], "messages": TURNS},
]


@pytest.mark.parametrize("body", HALVES, ids=repr)
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(client, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    content = json.dumps(body if "messages" in body else {"prompt": "a"} | body)
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(body)))


def test_a_draft_with_a_shorter_context_bounds_no_answer():
    size = len(ALPHABET)
    target = TabularModel(RandomTable(size, 11), size, max_length=CONTEXT)
    draft = TabularModel(RandomTable(size, 11, "ties"), size, max_length=20)
    parts = make_components(target, draft, tree="chain(3)")
    with TestClient(toy_app(Decoder(parts, tokenizer=Letters()))) as short:
        answer = complete(short, prompt="a", max_tokens=100, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 100
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        assert short.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
