"""What an operator sees: ids and lines of requests, names of keys, process metrics, TLS and paths behind a proxy."""

import json
import logging
import shutil
import subprocess

import httpx
import pytest
from fastapi.testclient import TestClient

from monge.core.errors import OptionError
from monge.options import ServeOptions
from monge.serve.api import streaming
from monge.serve.observe.logs import REQUESTS, log_config_of
from monge.serve.settings import checked_options, keys_of
from tests.serve.process import served
from tests.serve.served import LONG, live, samples, slow_decoder, toy_app

BODY = {"prompt": "once upon", "max_tokens": 5, "ignore_eos": True}
BEARER = {"authorization": "Bearer secret"}


def lines_of(caplog):
    return [record for record in caplog.records if record.name == REQUESTS]


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who\nana:secret\n\nben: other \nana:second\n")
    return str(file)


def test_a_request_has_one_id_in_its_answer_and_in_the_log(client, caplog):
    caplog.set_level(logging.INFO, REQUESTS)
    for sent in ("trace-1/a", None, "two words", "x" * 200, "ü"):
        headers = {} if sent is None else {"x-request-id": sent.encode("latin-1")}
        answer = client.post("/v1/completions", json=BODY, headers=headers)
        name = answer.headers["x-request-id"]
        assert (name == sent) == (sent == "trace-1/a")
        assert answer.json()["id"] == f"cmpl-{name}"
        assert lines_of(caplog)[-1].fields["request_id"] == name
    refused = client.get("/nothing", headers={"x-request-id": "mine"})
    assert refused.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_tokens_times_and_the_name_of_the_key(keys, caplog, stream):
    caplog.set_level(logging.INFO, REQUESTS)
    with TestClient(toy_app(api_key_file=keys, api_keys=("plain",))) as client:
        for key in ("secret", "second", "plain"):
            headers = {"authorization": f"Bearer {key}"}
            body = BODY | {"stream": stream}
            answer = client.post("/v1/completions?a=%0A", json=body, headers=headers)
            assert answer.status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 401
        told = samples(client.get("/metrics").text)
    *good, bad = [one.fields for one in lines_of(caplog)[:4]]
    assert [one["key"] for one in good] == ["ana", "ana", "1"]
    for fields in good:
        assert (fields["prompt_tokens"], fields["completion_tokens"]) == (9, 5)
        assert fields["finish_reason"] == "length"
        assert fields["duration_s"] >= fields["first_token_s"] >= fields["queue_s"] >= 0
    assert bad["code"] == "invalid_api_key"
    assert "key" not in bad
    assert "secret" not in caplog.text
    text = lines_of(caplog)[0].getMessage()
    assert text == "POST /v1/completions 200"
    tokens = {
        (one.labels["key"], one.labels["kind"]): one.value
        for one in told
        if one.name == "monge:tokens_by_key_total"
    }
    assert tokens == {
        **{("ana", "prompt"): 18, ("ana", "completion"): 10},
        **{("1", "prompt"): 9, ("1", "completion"): 5},
    }
    answers = {one.labels["key"] for one in told if one.name == "monge:http_requests_total"}
    assert answers == {"ana", "1", "none"}
    names = {one.name for one in told}
    assert {"process_resident_memory_bytes", "python_gc_collections_total"} <= names


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_the_log(form):
    config = log_config_of(form, logs_requests=True)
    assert config["handlers"]["stderr"]["formatter"] == form
    own = dict(config["formatters"][form])
    formatter = own.pop("()")(**own)
    error = ValueError, ValueError("because"), None
    record = logging.LogRecord("monge", logging.ERROR, __file__, 1, "it %s", ("broke\n",), error)
    record.fields = {"request_id": "a", "duration_s": 0.5}
    text = formatter.format(record)
    if form == "json":
        entry = json.loads(text)
        assert "\n" not in text
        assert entry["time"].endswith("Z")
        assert entry["exception"] == "ValueError: because"
        names = ("level", "message", "request_id", "duration_s")
        assert [entry[name] for name in names] == ["ERROR", "it broke\n", "a", 0.5]
    else:
        assert "ERROR monge: it broke\n request_id=a duration_s=0.5\nValueError: because" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no key"),
        ("secret", "line 1: an API key must be printable"),
        ("a:secret\nb: ü", "line 2: an API key must be printable"),
        ("two words:secret", "line 1: expected `name:key`"),
        ("a:secret\nb:secret", "line 2: this key has the name 'a' already"),
    ],
    ids=repr,
)
def test_bad_files_of_keys_are_refused(tmp_path, lines, message):
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(OptionError, match=message) as caught:
        checked_options(ServeOptions(api_key_file=str(file)))
    assert "secret" not in str(caught.value)
    with pytest.raises(OptionError, match="cannot read"):
        keys_of(ServeOptions(api_key_file=str(tmp_path / "none")))


def test_a_file_of_keys_that_changes_is_read_again(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("ana:first\n")
    with TestClient(toy_app(api_key_file=str(file))) as client:

        def status(key):
            headers = {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json=BODY, headers=headers).status_code

        assert (status("first"), status("other")) == (200, 401)
        file.write_text("ana:first\nbo:other\n")
        assert (status("first"), status("other")) == (200, 200)
        file.write_text("bo:other\n")
        assert (status("first"), status("other")) == (401, 200)
        caplog.clear()
        for content in ("", "bo: nöt a key\n", None):
            file.unlink() if content is None else file.write_text(content)
            assert (status("first"), status("other")) == (401, 200)
        kept = [one.getMessage() for one in caplog.records if "keys stay" in one.getMessage()]
        assert len(kept) == 3
        assert "nöt" not in caplog.text


def test_a_stream_that_waits_has_comments(monkeypatch):
    monkeypatch.setattr(streaming, "_SILENT_S", 0.01)
    app = toy_app(slow_decoder(max_batch_size=1))
    body = LONG | {"max_tokens": 8, "stream": True}
    with (
        live(app) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as first,
    ):
        next(first.iter_lines())
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as waiting:
            lines = waiting.iter_lines()
            assert next(lines) == ": waiting"
            first.close()
            events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2
    assert app.state.snapshot().finished == {"cancelled": 1, "length": 1}


def test_pages_of_a_site_may_be_allowed():
    origin, key = {"origin": "https://my.site"}, {"authorization": "Bearer secret"}
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    path, allowed = "/v1/completions", "access-control-allow-origin"
    options = {"api_keys": ("secret",), "allowed_hosts": ("testserver",)}
    with TestClient(toy_app(allowed_origins=("https://my.site",), **options)) as client:
        preflight = client.options(path, headers=origin | asks)
        assert preflight.status_code == 200
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for headers, status in ((key, 200), ({}, 401)):
            answer = client.post(path, json=BODY, headers=origin | headers)
            assert (answer.status_code, answer.headers[allowed]) == (status, "https://my.site")
        answer = client.post(path, json=BODY, headers=key | {"origin": "a://b"})
        assert allowed not in answer.headers
    with TestClient(toy_app(**options)) as client:
        assert client.options(path, headers=origin | asks | key).status_code == 405
        assert allowed not in client.post(path, json=BODY, headers=origin | key).headers


def test_a_process_with_tls_behind_a_path_logs_json(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout"
    made = [*command.split(), key, "-out", certificate]
    subprocess.run(made, check=True, capture_output=True)
    tls = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    logs = ("--access-log", "--log-format", "json", "--api-key", "secret")
    with served(*tls, *logs, "--root-path", "/models") as (process, url):
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=False, timeout=60) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            answer = client.post("/v1/completions", json=BODY, headers=BEARER)
            assert answer.status_code == 200
            servers = client.get("/openapi.json", headers=BEARER).json()["servers"]
            assert servers == [{"url": "/models"}]
            counted = client.get("/metrics").text
        process.terminate()
        lines = [json.loads(line) for line in process.communicate(timeout=60)[1].splitlines()]
    assert 'endpoint="/health"' in counted
    (line,) = [one for one in lines if one.get("prompt_tokens")]
    assert line["message"] == "POST /models/v1/completions 200"
    assert line["request_id"] == answer.headers["x-request-id"]
