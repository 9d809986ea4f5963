"""Log-probabilities are the target's own, on the networks that ship."""

import json
import math
import threading

import pytest
import torch
from fastapi.testclient import TestClient

from monge.api import built_in, load
from monge.engine import opening
from monge.loading.networks import load_network
from monge.options import ServeOptions
from monge.requests.text import TokenTexts
from monge.serve.api.answers import Answers
from monge.serve.http.app import create_app

TEXT = "The history of mathematics"
ROUNDING = 2e-4
"""Between float32 forwards over trees and over the whole text."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def decoder():
    return load(dtype="float32", controller="fixed")


@pytest.fixture(scope="module")
def network():
    return load_network(built_in("target"), dtype="float32")


def served(decoder, **options):
    return TestClient(create_app(decoder, ServeOptions(**options)))


@pytest.fixture(scope="module")
def client(decoder):
    with served(decoder) as made:
        yield made


def complete(client, **fields):
    answer = client.post("/v1/completions", json={"prompt": TEXT} | fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def stream(client, **fields):
    body = {"prompt": TEXT, "stream": True} | fields
    lines = client.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


def own_logprobs(network, ids):
    """Row i: the law of token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([ids])).logits[0].double(), dim=-1)


def ids_after(decoder, written):
    """Tokens of a completion, which the answer names by their text."""
    texts = TokenTexts(decoder.tokenizer)
    names = list(map(texts.name, range(decoder.components.target.vocab_size)))
    assert all(names.count(name) == 1 for name in written), "choose another seed"
    return [*decoder.encode(TEXT), *map(names.index, written)]


@pytest.mark.parametrize("as_ids", [False, True])
def test_loglikelihood_as_lm_eval_asks_for_it(client, decoder, network, as_ids):
    """`local-completions`: echo, one token more, temperature 0.

    Scores are read between context and the last token.
    """
    ids = list(decoder.encode(TEXT))
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    prompt = [ids] if as_ids else TEXT
    choice = complete(client, model="built-in", prompt=prompt, **fields)
    told, own = choice["logprobs"], own_logprobs(network, ids)
    assert {len(one) for one in told.values()} == {len(ids) + 1}
    assert len(told) == 4
    assert choice["text"].startswith(TEXT)
    assert told["token_logprobs"][0] is None
    assert "".join(told["tokens"][:-1]) == TEXT
    for place in range(1, len(ids)):
        row, logprob = own[place - 1], told["token_logprobs"][place]
        best = max(told["top_logprobs"][place].values())
        assert logprob == pytest.approx(float(row[ids[place]]), abs=ROUNDING)
        assert best == pytest.approx(float(row.max()), abs=ROUNDING)
        assert (logprob == best) == (int(row.argmax()) == ids[place])
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_a_prompt_alone_is_scored(client):
    fields = {"temperature": 0, "logprobs": 0, "echo": True}
    one, none = complete(client, max_tokens=1, **fields), complete(client, max_tokens=0, **fields)
    assert (none["text"], none["finish_reason"]) == (TEXT, "length")
    assert none["logprobs"]["token_logprobs"] == one["logprobs"]["token_logprobs"][:-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_of_what_is_written(client, decoder, network, temperature):
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 8, "logprobs": 3}
    told = complete(client, **fields)["logprobs"]
    ids = ids_after(decoder, told["tokens"])
    own = own_logprobs(network, ids)
    pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    for place, (logprob, top) in enumerate(pairs, start=len(ids) - len(told["tokens"])):
        assert logprob == pytest.approx(float(own[place - 1, ids[place]]), abs=ROUNDING)
        best = own[place - 1].topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=ROUNDING)
        assert 3 <= len(top) <= 4


def test_streamed_logprobs_are_the_same(client):
    fields = {"seed": 3, "max_tokens": 8, "logprobs": 2, "echo": True}
    parts = [one["logprobs"] for one in stream(client, **fields) if one["logprobs"] is not None]
    for key, values in complete(client, **fields)["logprobs"].items():
        assert [value for part in parts for value in part[key]] == values


def test_processed_logprobs_are_those_of_the_drawn_law():
    with served(load(dtype="float32", controller="fixed"), logprobs_of="processed") as client:
        greedy = complete(client, temperature=0, max_tokens=4, logprobs=2)["logprobs"]
        cut = complete(client, top_k=2, max_tokens=4, logprobs=5, seed=0)["logprobs"]
    assert greedy["token_logprobs"] == [0.0] * 4
    for top in cut["top_logprobs"]:
        assert sum(map(math.exp, top.values())) == pytest.approx(1.0, abs=1e-12)
        assert len(top) <= 2


@pytest.mark.parametrize("source", ["raw", "processed"])
def test_drawn_logprobs_of_a_completion_are_those_of_the_network(decoder, network, source):
    fields = {"temperature": 0.7, "top_k": 4, "seed": 3, "max_tokens": 8, "logprobs": 0}
    with served(decoder, logprobs_of=source) as client:
        told = complete(client, **fields, drawn_logprobs=True)["logprobs"]
        drawn, own_names = told.pop("drawn"), ["processed", "raw", "kept_mass"]
        assert told == complete(client, **fields)["logprobs"]
        assert list(drawn) == own_names
        assert drawn[source] == told["token_logprobs"]
        parts = [one["logprobs"] for one in stream(client, **fields, drawn_logprobs=True)]
        for name in own_names:
            streamed = [value for part in parts if part for value in part["drawn"][name]]
            assert streamed == drawn[name]
        echoed = complete(client, **fields, drawn_logprobs=True, echo=True)["logprobs"]
        rules = {name: fields[name] for name in ("temperature", "top_k", "seed", "logprobs")}
        (result,) = decoder.generate([TEXT], max_new_tokens=8, **rules)
    num_prompt = len(decoder.encode(TEXT))
    assert echoed["drawn"]["raw"] == [None] * num_prompt + drawn["raw"]
    for name in own_names:
        offline = [getattr(entry.drawn, name) for entry in result.logprobs]
        assert offline == pytest.approx(drawn[name], abs=1e-12)
    ids = ids_after(decoder, told["tokens"])
    own = own_logprobs(network, ids)
    for place, token in enumerate(ids[num_prompt:]):
        row = own[num_prompt + place - 1]
        before = torch.log_softmax(row / 0.7, 0)
        best = before.topk(4).values.exp().sum()
        assert drawn["raw"][place] == pytest.approx(float(row[token]), abs=ROUNDING)
        assert drawn["kept_mass"][place] == pytest.approx(float(best), abs=ROUNDING)
        cut = float(before[token] - best.log())
        assert drawn["processed"][place] == pytest.approx(cut, abs=2 * ROUNDING)


def test_drawn_logprobs_of_a_chat_are_told(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
    asked = body | {"logprobs": True, "drawn_logprobs": True, "top_k": 3}
    answer = client.post("/v1/chat/completions", json=asked).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["drawn"]["raw"] == entry["logprob"]
        assert 0 < entry["drawn"]["kept_mass"] < 1
    for path, fields in (("chat/", body), ("", {"prompt": TEXT})):
        plain = client.post(f"/v1/{path}completions", json=fields | {"drawn_logprobs": False})
        assert plain.status_code == 200


def test_bytes_of_tokens(decoder):
    texts = TokenTexts(decoder.tokenizer)
    for text in ("héllo", "日本", "plain"):
        ids = decoder.tokenizer(text)["input_ids"]
        assert bytes(byte for token in ids for byte in texts.utf8(token) or []).decode() == text


def test_characters_are_never_cut(client, decoder):
    """Forced bytes of a character that needs three tokens, in any order: pieces are those of the whole."""
    ids = decoder.tokenizer("日")["input_ids"]
    assert len(ids) > 1
    first = {"logit_bias": {str(ids[0]): 100}, "temperature": 0, "max_tokens": 1}
    assert complete(client, **first)["text"] == REPLACEMENT
    bias = dict.fromkeys(map(str, ids), 90)
    fields = {"logit_bias": bias, "temperature": 1, "seed": 1, "max_tokens": 30, "logprobs": 3}
    pieces = stream(client, **fields, return_token_ids=True)
    generated = [token for piece in pieces for token in piece["token_ids"]]
    text = decoder.tokenizer.decode(generated)
    assert "".join(piece["text"] for piece in pieces) == text
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    assert "".join(token for part in told for token in part["tokens"]) == text
    assert all(len(top) >= 3 for part in told for top in part["top_logprobs"])
    offsets = [offset for part in told for offset in part["text_offset"]]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_special_token_stops(client, decoder, is_stream):
    (special,) = decoder.tokenizer.all_special_ids[:1]
    text = decoder.tokenizer.convert_ids_to_tokens(special)
    fields = {"logit_bias": {str(special): 100}, "ignore_eos": True, "stop": ["zzz", text]}
    made = stream(client, **fields)[-1] if is_stream else complete(client, **fields)
    assert (made["finish_reason"], made["stop_reason"], made["text"]) == ("stop", text, "")
    options = {"ignore_eos": True, "stop": [text], "max_new_tokens": 8}
    (result,) = decoder.generate([TEXT], logit_bias={special: 100}, **options)
    assert (result.finish_reason, result.token_ids[-1:]) == ("stop", (special,))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_is_scored_once_for_its_choices(client, decoder, monkeypatch, is_stream):
    scored, score = [], opening.score
    monkeypatch.setattr(opening, "score", lambda *given: scored.append(1) or score(*given))
    fields = {"n": 3, "max_tokens": 2, "echo": True, "logprobs": 2, "seed": 1}
    if is_stream:
        choices = stream(client, **fields)
    else:
        choices = client.post("/v1/completions", json={"prompt": TEXT} | fields).json()["choices"]
    given = {}
    for choice in choices:
        given.setdefault(choice["index"], choice["logprobs"])
    length = len(decoder.encode(TEXT))
    assert (len(scored), len(given)) == (1, 3)
    for one in given.values():
        for name in ("token_logprobs", "top_logprobs"):
            assert one[name][:length] == given[0][name][:length]
        assert None not in one["token_logprobs"][1:]
        assert len(one["token_logprobs"]) > length


def test_log_probabilities_of_an_answer_are_bounded(decoder, monkeypatch):
    monkeypatch.setattr("monge.serve.api.request_parser._MOST_SCORES", 1000)
    with served(decoder) as bounded:
        for fields, num in (
            ({"max_tokens": 48, "logprobs": 20}, 1008),
            ({"max_tokens": 4, "logprobs": 20, "n": 12}, 1008),
            ({"max_tokens": 1, "logprobs": 9, "n": 2, "echo": True}, 1020),
        ):
            answer = bounded.post("/v1/completions", json={"prompt": [1] * 50} | fields)
            error = answer.json()["error"]
            assert error["param"] == "logprobs"
            assert f"= {num}; this server gives at most 1000 in an answer" in error["message"]
        fine = {"prompt": [1] * 50, "max_tokens": 1, "logprobs": 9, "echo": True}
        assert complete(bounded, **fine)["logprobs"]


def test_answers_are_written_in_a_thread_of_their_own(client, monkeypatch):
    threads, honest = [], Answers._chat_logprobs

    def noted(self, entries):
        threads.append(threading.current_thread().name)
        return honest(self, entries)

    monkeypatch.setattr(Answers, "_chat_logprobs", noted)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 2}
    for more in ({}, {"stream": True}):
        assert client.post("/v1/chat/completions", json=body | more).status_code == 200
    assert set(threads) == {"monge-answers"}
