"""`monge serve` as its users start it, and every example of its guide."""

import gc
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from monge.cli.app import app
from monge.options import ServeOptions
from monge.serve import run
from tests.serve.process import ENVIRONMENT, served
from tests.serve.served import is_refused, toy_app, wait_for

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"```bash\n(.*?)```", GUIDE, re.S)
CURLS = [block for block in BLOCKS if block.startswith("curl") and "%{time" not in block]
(PYTHON,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


@pytest.fixture(scope="module")
def server():
    """A process and the address that it told."""
    with served() as running:
        yield running


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", CURLS, ids=lambda block: block.split()[1])
def test_curl_examples_of_the_guide(server, block):
    assert len(CURLS) == 10
    script = block.replace("curl", "curl -sS --fail-with-body").replace(ADDRESS, server[1])
    text = output_of(["bash", "-ec", script])
    if block.startswith("curl -N"):
        *chunks, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert end == "[DONE]"
        assert json.loads(chunks[-1])["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    elif "/metrics" in block:
        assert "vllm:spec_decode_num_drafts_total" in text
    else:
        answer = json.loads(text)
        assert answer.get("choices") or answer.get("output") or answer["data"]


def test_python_example_of_the_guide(server):
    command = [sys.executable, "-c", PYTHON.replace(ADDRESS, server[1])]
    assert "num_spec_steps" in output_of(command)


def test_sigterm_finishes_what_runs_and_takes_no_connection_meanwhile(server):
    """The last test of the server: it is gone after it."""
    process, url = server
    body = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: is_refused(url))
        *events, end = [line for line in [first, *lines] if line]
        chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert end == "data: [DONE]"
    assert chunks[-1]["usage"]["completion_tokens"] == 200
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port 99999", "--port must lie in 0..65535; got 99999"),
        ("./no-such-folder", "no folder './no-such-folder'"),
        ("--drafter nonsense", "unknown drafter 'nonsense'"),
        ("--served-model-name=", "must be one word"),
        ("--graceful-timeout -1", "--graceful-timeout must be at least 0; got -1"),
        ("--lame-duck -1", "--lame-duck is --shutdown-delay now"),
        ("--lame-duck=-1", "--shutdown-delay must be at least 0; got -1"),
        ("--drain -1", "--graceful-timeout must be at least 0; got -1"),
        ("--chat-template missing.jinja", "neither 'instruction' nor a readable file"),
        ("--kv-budget 0", "kv_budget_tokens"),
        ("--logprobs-of both", "Invalid value for '--logprobs-of'"),
        ("--threads 0", "--threads must be at least 1"),
    ],
)
def test_bad_serve_options_are_refused(arguments, message):
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_open_address_is_said(monkeypatch):
    monkeypatch.setattr(run, "serve_until_signal", lambda *_, **__: None)
    open_to_all = ["serve", "--host", "0.0.0.0", "--port", "0"]
    assert "anyone who reaches this address" in CliRunner().invoke(app, open_to_all).stderr
    guarded = CliRunner().invoke(app, open_to_all, env={"MONGE_API_KEY": "secret"})
    assert guarded.exit_code == 0
    assert "anyone" not in guarded.stderr
    assert "secret" not in guarded.stderr


def test_loaded_objects_are_frozen_for_the_garbage_collector(monkeypatch):
    """A full collection over it is a pause of a third of a second, for all who wait."""
    frozen = []
    noted = lambda *_, **__: frozen.append(gc.get_freeze_count())  # noqa: E731
    monkeypatch.setattr(run.uvicorn.Server, "run", noted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with socket.socket() as listener:
            run.serve_until_signal(toy_app(), listener, ServeOptions(graceful_timeout_s=1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0, "what is frozen when the process ends is never freed"
