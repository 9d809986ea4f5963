"""Records that a server returns are certified, and requests beside them are as without them."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from monge.audit import recorder as recording
from monge.audit.certificate import read_certificate
from monge.audit.recorder import RunRecorder
from monge.serve.scheduling.scheduler import Scheduler
from tests.audit.certified import certified, reread
from tests.serve.served import toy_app, toy_decoder
from tests.serve.toy import Mine, alone, decoder, generation, submit

pytestmark = pytest.mark.usefixtures("unchecked_types")
PATHS = {
    "/v1/completions": {"prompt": "once upon", "temperature": 0.8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0},
}
PARTS = {
    "a chain": {},
    "a tree": {"tree": "fixed_width((2, 2), 'iid')", "verifier": "rrs"},
    "a whole-tree rule": {"tree": "fixed_width((2, 1))", "verifier": "traversal"},
    "a controller that draws": {"controller": "on_the_fly"},
}


def server(made, **settings):
    return TestClient(
        toy_app(made, recorder=RunRecorder(made), **settings), raise_server_exceptions=False
    )


def ask(client, path="/v1/completions", **fields):
    start = {"max_tokens": 8, "certificate": True}
    return client.post(path, json=PATHS[path] | start | fields)


def saved(answer, path):
    """The certificate of an answer, through a file."""
    assert answer.status_code == 200, answer.text
    path.write_text(json.dumps(answer.json()["certificate"]))
    return read_certificate(path)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_certificate_of_an_answer_is_exact(parts, tmp_path):
    make = lambda: toy_decoder(**parts).components  # noqa: E731
    with server(toy_decoder(**parts)) as client:
        for path in PATHS:
            answer = ask(client, path)
            certificate = saved(answer, tmp_path / "run.json")
            report = certified(certificate, make, num_nodes=4)
            assert report.answer == "exact", report.findings
            (request,) = certificate.requests
            assert report.num_tokens == answer.json()["usage"]["completion_tokens"]
            # Plans that read times do not give the text of a seed again, so answers hide it.
            assert answer.json()["seed"] in {None, request["seed"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "prompt": ["once", "twice"], "max_tokens": 4},
        {"stop": ["e"], "max_tokens": 40, "top_k": 3, "top_p": 0.9},
        {"speculation": False, "stop_token_ids": [5], "logprobs": 2},
        {"speculation": {"max_depth": 1, "adaptive": False}},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=", ".join,
)
def test_fields_beside_it(fields, tmp_path):
    with server(toy_decoder()) as client:
        answer = ask(client, seed=5, **fields)
        certificate = saved(answer, tmp_path / "run.json")
        plain = ask(client, seed=5, certificate=False, **fields).json()
    made = toy_decoder()
    report = certified(
        certificate,
        lambda: made.components,
        tokenizer=made.tokenizer,
        eos_ids=made.eos_ids,
        num_nodes=4,
    )
    assert report.answer == "exact", report.findings
    assert "not checked" not in report.summary()
    assert len(certificate.requests) == len(plain["choices"])
    assert answer.json()["choices"] == plain["choices"]
    assert "certificate" not in plain


def test_a_server_without_recorder_refuses():
    with TestClient(toy_app()) as client:
        error = ask(client).json()["error"]
        assert error["param"] == "certificate"
        assert "start it with --certificates" in error["message"]
        assert ask(client, certificate=False).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "leave stream out"),
        ({"frequency_penalty": 1.0}, "a certificate cannot hold logits processors"),
        ({"logit_bias": {"3": 1.0}}, "a certificate cannot hold logits processors"),
        ({"certificate": "yes"}, "valid boolean"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_decoding(fields, message):
    app = toy_app(made := toy_decoder(), recorder=RunRecorder(made))
    with TestClient(app) as client:
        answer = ask(client, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert app.state.snapshot().num_prompt_tokens == 0


def test_a_record_that_takes_too_much_memory_ends_its_request():
    made = toy_decoder()
    app = toy_app(made, recorder=RunRecorder(made), max_certificate_bytes=5000)
    with TestClient(app) as client:
        answer = ask(client, max_tokens=200, ignore_eos=True)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "certificate_too_large")
        assert "fewer tokens" in error["message"]
        assert ask(client, max_tokens=200, ignore_eos=True, temperature=0).status_code == 200
        assert ask(client, max_tokens=200, certificate=None).status_code == 200
    now = app.state.snapshot()
    assert now.finished["oversized"] == 1
    assert now.num_generated_tokens < 600
    assert now.kv_used_tokens == 0


def test_nothing_is_recorded_if_nobody_asks(monkeypatch):
    made = toy_decoder()
    with TestClient(toy_app(made)) as client:
        plain = ask(client, certificate=None, seed=1).json()
    for name in ("Tape", "_WatchedLaws"):
        monkeypatch.setattr(recording, name, type("Unused", (), {}))
    with server(made) as client:
        body = ask(client, certificate=None, seed=1).json()
    assert "certificate" not in body
    for name in ("choices", "system_fingerprint"):
        assert body[name] == plain[name]


def crowd():
    return [
        generation(*(1 + row, 2), seed=row, tokens=6 + row, temperature=(0.0, 0.7, 1.0)[row % 3])
        for row in range(5)
    ]


def served(recorder, requests, *, recorded):
    """Outputs of requests of which every so many are recorded."""
    scheduler = Scheduler(recorder.decoder)
    handles = [  # together, since it does not run yet
        submit(scheduler, one)
        if row % recorded
        else submit(scheduler, recorder.recorded(one), is_oversized=lambda _: False)
        for row, one in enumerate(requests)
    ]
    with scheduler:
        return [handle.completion(60) for handle in handles]


@pytest.mark.parametrize(
    ("tree", "verifier"), [("chain(3)", "block"), ("fixed_width((2, 2), 'iid')", "rrs")]
)
def test_a_crowd_writes_what_each_writes_alone(tree, verifier):
    make = lambda: decoder(tree=tree, verifier=verifier)  # noqa: E731
    recorder = RunRecorder(make())
    generations = crowd()
    completions = served(recorder, generations, recorded=2)
    expected = [alone(one, tree=tree, verifier=verifier) for one in generations]
    assert [one.token_ids for one in completions] == expected
    assert [one.recorded is not None for one in completions] == [True, False, True, False, True]
    sessions = [one.recorded for one in completions if one.recorded is not None]
    certificate = reread(recorder.certificate(sessions))
    assert certificate.requests[0]["rounds"][0]["batch_size"] == 5
    report = certified(certificate, lambda: make().components)
    assert report.answer == "exact", report.findings
    assert report.num_tokens == 6 + 8 + 10


def test_a_neighbour_that_fails_leaves_no_trace():
    made = decoder()
    recorder = RunRecorder(made)
    requests = crowd()
    requests[1] = replace(requests[1], processors=(Mine(5),))
    completions = served(recorder, requests, recorded=2)
    assert [one.finish_reason for one in completions] == ["length", "error", *["length"] * 3]
    certificate = reread(recorder.certificate([one.recorded for one in completions[::2]]))
    report = certified(certificate, lambda: decoder().components)
    assert report.answer == "exact", report.findings


def test_records_of_requests_that_left_are_forgotten():
    made = decoder()
    recorder = RunRecorder(made)
    draws = []

    def submitted(scheduler, request):
        recorded = recorder.recorded(request)
        draws.append(weakref.ref(recorded.draws))
        return submit(scheduler, recorded, is_oversized=lambda _: False)

    with Scheduler(recorder.decoder) as scheduler:
        ended = submitted(scheduler, generation(1))
        assert ended.completion(60).recorded is not None
        cancelled = submitted(scheduler, generation(2, tokens=30_000))
        next(iter(cancelled))
        cancelled.cancel()
        assert list(cancelled)[-1].finish_reason == "cancelled"
        made.components.target.failing.add(3)
        failed = submitted(scheduler, generation(3))
        assert failed.completion(60).finish_reason == "error"
        gc.collect()
        assert [one() for one in draws] == [None] * 3
