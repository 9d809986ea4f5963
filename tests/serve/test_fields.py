"""Fields that clients of vLLM send beside those of OpenAI: what they change is what the library does."""

import json

import pytest
from fastapi.testclient import TestClient

from tests.serve.served import ALPHABET, CONTEXT, toy_app, toy_decoder

PROMPT = "once upon"
START = {"prompt": PROMPT, "max_tokens": 30, "seed": 1}
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
CHAT = "/v1/chat/completions"


def ask(client, path="/v1/completions", **fields):
    is_whole = path != "/v1/completions"
    answer = client.post(path, json=fields if is_whole else START | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(client, path="/v1/completions", **fields):
    answer = client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def offline(prompt=PROMPT, **options):
    return toy_decoder().generate(prompt, seed=1, temperature=1.0, max_new_tokens=30, **options)[0]


def test_a_number_has_one_type():
    with TestClient(toy_app()) as client:
        floats = {"max_tokens": 4.0, "seed": 1.0, "top_k": 3.0, "temperature": 1, "n": 1e0}
        content = json.dumps({"prompt": [2.0, 3.0]} | floats)
        headers = {"content-type": "application/json"}
        answer = client.post("/v1/completions", content=content, headers=headers)
        whole = ask(client, prompt=[2, 3], max_tokens=4, seed=1, top_k=3)
        assert answer.json()["choices"] == whole["choices"]
        for value in (4.5, 1e300, -4.0):
            assert error_of(client, prompt="a", max_tokens=value)["param"] == "max_tokens"
        assert error_of(client, prompt="a", stream=1.0)["param"] == "stream"


IDS = offline().token_ids
LETTERS = "".join(ALPHABET[token] for token in IDS)
LATE = ALPHABET.index(LETTERS[4])


@pytest.mark.parametrize(
    ("fields", "reason", "finish"),
    [
        ({"stop": ["zzz", LETTERS[5:7]]}, LETTERS[5:7], "stop"),
        ({"stop_token_ids": [LATE, 29]}, LATE, "stop"),
        ({"stop": ["zzz"], "max_tokens": 4}, None, "length"),
        ({"logit_bias": {"0": 100}}, None, "stop"),
        ({"max_tokens": 0, "echo": True, "stop_token_ids": list(range(30))}, None, "length"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_reason_of_a_text_is_told(client, fields, reason, finish, stream):
    if stream:
        answer = client.post("/v1/completions", json=START | fields | {"stream": True})
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert {one["stop_reason"] for one in choices[:-1]} <= {None}
    else:
        choices = ask(client, **fields)["choices"]
    assert (choices[-1]["stop_reason"], choices[-1]["finish_reason"]) == (reason, finish)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_token_ids_of_prompt_and_completion(client, path):
    prompt = "Instruction: hello\nResponse: well" if path == CHAT else PROMPT
    result, own = offline(prompt), list(toy_decoder().encode(prompt))
    chat = {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": False}
    body = (chat if path == CHAT else {"prompt": prompt}) | {"seed": 1, "max_tokens": 30}
    body |= {"return_token_ids": True}
    whole = client.post(path, json=body).json()
    assert whole["choices"][0]["token_ids"] == list(result.token_ids)
    assert (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"] == own
    lines = client.post(path, json=body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line[6:]) for line in lines]
    streamed = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", ())]
    assert streamed == list(result.token_ids)
    assert (chunks[0] if path == CHAT else chunks[0]["choices"][0])["prompt_token_ids"] == own


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, 5, 7]},
        {"bad_words": [LETTERS[3], LETTERS[:2]]},
        {"bad_words": ["a"], "allowed_token_ids": [1, 2, 3], "min_tokens": 20},
    ],
    ids=str,
)
def test_masks_are_those_of_the_library(client, fields):
    result = offline(**fields)
    assert ask(client, **fields)["choices"][0]["text"] == result.text != offline().text
    assert not any(word in result.text for word in fields.get("bad_words", ()))
    assert set(result.token_ids) <= set(fields.get("allowed_token_ids", range(30)))


def test_scores_of_a_prompt(client):
    echo = ask(client, echo=True, logprobs=2, max_tokens=0)["choices"][0]["logprobs"]
    fields = {"prompt_logprobs": 3, "n": 2, "echo": True, "logprobs": 2, "max_tokens": 1}
    choices = ask(client, **fields)["choices"]
    for choice in choices:
        first, *scores = choice["prompt_logprobs"]
        assert first is None
        assert len(scores) == len(PROMPT) - 1
        for token, score, own in zip(PROMPT[1:], scores, echo["token_logprobs"][1:], strict=True):
            entry = score[str(max(ALPHABET.find(token), 0))]
            assert (entry["logprob"], entry["decoded_token"]) == (own, token)
            assert sorted(one["rank"] for one in score.values())[:3] == [1, 2, 3]
        assert choice["logprobs"]["top_logprobs"][: len(PROMPT)] == echo["top_logprobs"]
    chat = ask(client, CHAT, messages=TURNS[:1], max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_tokens_of_texts_and_of_conversations(client):
    told = ask(client, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert told["tokens"] == list(toy_decoder().encode(PROMPT))
    assert (told["count"], told["max_model_len"]) == (len(PROMPT), CONTEXT)
    assert "".join(told["token_strs"]) == PROMPT
    answer = client.post("/detokenize", json={"tokens": [*told["tokens"], 0], "model": "toy"})
    assert answer.json() == {"prompt": f"{PROMPT}<end>"}
    text = "Instruction: hello\nResponse: well\n\nResponse:"
    ids = client.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
    assert ids == list(toy_decoder().encode(text))


def test_more_tokens_than_fit_are_cut_by_an_option():
    with TestClient(toy_app(cut_max_tokens=True)) as client:
        texts = ["a" * (CONTEXT - 20), "b"]
        fields = {"prompt": texts, "max_tokens": 4096, "ignore_eos": True, "seed": 1}
        body = ask(client, **fields, return_token_ids=True)
        assert [len(one["token_ids"]) for one in body["choices"]] == [20, CONTEXT - 1]
        assert [one["finish_reason"] for one in body["choices"]] == ["length"] * 2
        for wrong in ({"prompt": "a" * CONTEXT}, {"prompt": texts[0], "min_tokens": 21}):
            error = error_of(client, **fields | wrong)
            assert error["code"] == "context_length_exceeded"
