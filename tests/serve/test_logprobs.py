"""Log-probabilities are the target's own, on the networks that ship."""

import json
import math
import threading

import pytest
import torch
from fastapi.testclient import TestClient

from monge.api import built_in, load
from monge.engine import prefill
from monge.engine.chat_format import chat_format
from monge.loading.networks import load_network
from monge.options import ServeOptions
from monge.serve import answers
from monge.serve.answers import TokenTexts
from monge.serve.app import create_app

TEXT = "The history of mathematics"
ROUNDING = 2e-4
"""Between float32 forwards over trees and over the whole text."""


@pytest.fixture(scope="module")
def decoder():
    return load(dtype="float32", controller="fixed")


@pytest.fixture(scope="module")
def network():
    return load_network(built_in("target"), dtype="float32")


@pytest.fixture(scope="module")
def client(decoder):
    chat = chat_format(decoder.tokenizer, None, is_built_in=True)
    with TestClient(create_app(decoder, ServeOptions(served_model_name="built-in"), chat)) as made:
        yield made


def complete(client, **fields):
    answer = client.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def own_logprobs(network, ids):
    """Row i: the law of token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([ids])).logits[0].double(), dim=-1)


def ids_after(client, decoder, body, prompt):
    """Tokens of a completion, which the answer names by their text."""
    names = [
        TokenTexts(decoder.tokenizer).name(token)
        for token in range(decoder.components.target.vocab_size)
    ]
    written = body["choices"][0]["logprobs"]["tokens"]
    assert all(names.count(name) == 1 for name in written), (
        "choose another seed: a token shares its text"
    )
    return [*decoder.encode(prompt), *map(names.index, written)]


@pytest.mark.parametrize("as_ids", [False, True])
def test_loglikelihood_as_lm_eval_asks_for_it(client, decoder, network, as_ids):
    """`local-completions`: echo, one token more, temperature 0.

    Scores are read between context and the last token.
    """
    ids = list(decoder.encode(TEXT))
    body = complete(
        client,
        model="built-in",
        prompt=[ids] if as_ids else TEXT,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    (choice,) = body["choices"]
    told, own = choice["logprobs"], own_logprobs(network, ids)
    assert (
        len(told["tokens"])
        == len(told["token_logprobs"])
        == len(told["top_logprobs"])
        == len(told["text_offset"])
        == len(ids) + 1
    )
    assert choice["text"].startswith(TEXT)
    assert told["token_logprobs"][0] is None
    assert "".join(told["tokens"][:-1]) == TEXT
    for place in range(1, len(ids)):
        row = own[place - 1]
        assert told["token_logprobs"][place] == pytest.approx(float(row[ids[place]]), abs=ROUNDING)
        assert max(told["top_logprobs"][place].values()) == pytest.approx(
            float(row.max()), abs=ROUNDING
        )
        is_greedy = told["token_logprobs"][place] == max(told["top_logprobs"][place].values())
        assert is_greedy == (int(row.argmax()) == ids[place])
    assert [
        choice["text"][offset:][: len(token)]
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True)
    ] == told["tokens"]


def test_a_prompt_alone_is_scored(client, decoder):
    one = complete(client, prompt=TEXT, temperature=0, max_tokens=1, logprobs=0, echo=True)
    none = complete(client, prompt=TEXT, temperature=0, max_tokens=0, logprobs=0, echo=True)
    assert none["choices"][0]["text"] == TEXT
    assert none["choices"][0]["finish_reason"] == "length"
    assert (
        none["choices"][0]["logprobs"]["token_logprobs"]
        == one["choices"][0]["logprobs"]["token_logprobs"][:-1]
    )
    assert none["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_of_what_is_written(client, decoder, network, temperature):
    body = complete(client, prompt=TEXT, temperature=temperature, seed=3, max_tokens=8, logprobs=3)
    told = body["choices"][0]["logprobs"]
    ids = ids_after(client, decoder, body, TEXT)
    start = len(ids) - len(told["tokens"])
    own = own_logprobs(network, ids)
    for place, (logprob, top) in enumerate(
        zip(told["token_logprobs"], told["top_logprobs"], strict=True), start=start
    ):
        assert logprob == pytest.approx(float(own[place - 1, ids[place]]), abs=ROUNDING)
        best = own[place - 1].topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=ROUNDING)
        assert 3 <= len(top) <= 4


def test_streamed_logprobs_are_the_same(client):
    fields = {"prompt": TEXT, "seed": 3, "max_tokens": 8, "logprobs": 2, "echo": True}
    whole = complete(client, **fields)["choices"][0]["logprobs"]
    lines = client.post("/v1/completions", json=fields | {"stream": True}).text.split("\n\n")[:-2]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] for line in lines]
    for key, values in whole.items():
        joined = [value for part in parts if part is not None for value in part[key]]
        assert joined == values


def test_processed_logprobs_are_those_of_the_drawn_law(decoder):
    chat = chat_format(decoder.tokenizer, None, is_built_in=True)
    fresh = load(dtype="float32", controller="fixed")
    with TestClient(
        create_app(fresh, ServeOptions(served_model_name="x", logprobs_of="processed"), chat)
    ) as client:
        greedy = complete(client, prompt=TEXT, temperature=0, max_tokens=4, logprobs=2)["choices"][
            0
        ]["logprobs"]
        cut = complete(client, prompt=TEXT, top_k=2, max_tokens=4, logprobs=5, seed=0)["choices"][
            0
        ]["logprobs"]
    assert greedy["token_logprobs"] == [0.0] * 4
    for top in cut["top_logprobs"]:
        assert sum(map(math.exp, top.values())) == pytest.approx(1.0, abs=1e-12)
        assert len(top) <= 2


def test_bytes_of_tokens(client, decoder):
    texts = TokenTexts(decoder.tokenizer)
    for text in ("héllo", "日本", "plain"):
        ids = decoder.tokenizer(text)["input_ids"]
        assert bytes(byte for token in ids for byte in texts.utf8(token) or []).decode() == text


def test_characters_are_never_cut(client, decoder):
    """Forced bytes of a character that needs three tokens.

    No piece of the stream holds half of it.
    """
    ids = decoder.tokenizer("日")["input_ids"]
    assert len(ids) > 1
    first = {"logit_bias": {str(ids[0]): 100}, "temperature": 0, "max_tokens": 1}
    broken = complete(client, prompt=TEXT, **first)["choices"][0]["text"]
    assert broken == "\N{REPLACEMENT CHARACTER}", (
        "at the very end there is nothing left to wait for"
    )
    both = {
        "logit_bias": dict.fromkeys(map(str, ids), 90),
        "temperature": 1,
        "seed": 1,
        "max_tokens": 30,
        "stream": True,
    }
    lines = client.post("/v1/completions", json={"prompt": TEXT} | both).text.split("\n\n")[:-2]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    ends = [piece for piece in pieces[:-1] if piece.endswith("\N{REPLACEMENT CHARACTER}")]
    assert ends == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_is_scored_once_for_its_choices(client, decoder, monkeypatch, is_stream):
    scored, score = [], prefill.score
    monkeypatch.setattr(prefill, "score", lambda *given: scored.append(1) or score(*given))
    fields = {"prompt": TEXT, "n": 3, "max_tokens": 2, "echo": True, "logprobs": 2, "seed": 1}
    if is_stream:
        text = client.post("/v1/completions", json=fields | {"stream": True}).text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n")[:-2]]
        choices = [json.loads(line)["choices"][0] for line in lines]
        first = {}
        for choice in choices:
            first.setdefault(choice["index"], choice["logprobs"])
        given = [first[index] for index in range(3)]
    else:
        given = [choice["logprobs"] for choice in complete(client, **fields)["choices"]]
    length = len(decoder.encode(TEXT))
    assert len(scored) == 1
    for one in given:
        assert one["token_logprobs"][:length] == given[0]["token_logprobs"][:length]
        assert one["top_logprobs"][:length] == given[0]["top_logprobs"][:length]
        assert None not in one["token_logprobs"][1:]
        assert len(one["token_logprobs"]) > length


def test_answers_are_written_in_a_thread_of_their_own(client, monkeypatch):
    threads, honest = [], answers.Answers._chat_logprobs

    def noted(self, entries):
        threads.append(threading.current_thread().name)
        return honest(self, entries)

    monkeypatch.setattr(answers.Answers, "_chat_logprobs", noted)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 2}
    for more in ({}, {"stream": True}):
        assert client.post("/v1/chat/completions", json=body | more).status_code == 200
    assert set(threads) == {"monge-answers_0"}


def test_log_probabilities_of_an_answer_are_bounded(decoder):
    settings = ServeOptions(served_model_name="built-in", max_logprobs=1000)
    chat = chat_format(decoder.tokenizer, None, is_built_in=True)
    ids = [1] * 50
    with TestClient(create_app(decoder, settings, chat)) as bounded:
        for fields, num in (
            ({"max_tokens": 48, "logprobs": 20}, 1008),
            ({"max_tokens": 4, "logprobs": 20, "n": 12}, 1008),
            ({"max_tokens": 1, "logprobs": 9, "n": 2, "echo": True}, 1020),
        ):
            error = bounded.post("/v1/completions", json={"prompt": [ids]} | fields).json()["error"]
            assert error["param"] == "logprobs"
            assert f"= {num}; this server gives at most 1000 in an answer" in error["message"]
        fine = {"prompt": [ids], "max_tokens": 1, "logprobs": 9, "echo": True}
        assert complete(bounded, **fine)["choices"][0]["logprobs"]
