"""The load generator counts what was sent, and tells failures from numbers."""

import asyncio
import itertools
import json
import sys
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from monge.bench import serve as bench
from monge.bench.serve import LoadSettings, figures, measure, percentiles
from monge.bench.serve_client import Reply, complete
from monge.bench.servers import Beside, Server, running, running_beside
from monge.cli.app import app
from monge.core.errors import MongeError, OptionError
from tests.serve.served import live, toy_app


def spec(steps, accepted):
    return {
        "speculative_decoding": {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}
    }


def test_figures():
    replies = [
        Reply(chunk_s=(0.1, 0.2, 0.4), total_s=0.5, num_tokens=6, metrics=spec(3, 3)),
        Reply(chunk_s=(0.3,), total_s=0.4, num_tokens=2, metrics=spec(1, 2)),
        Reply(failure="status 429"),
    ]
    told = figures(replies, 2.0)
    assert (told["num_requests"], told["num_failed"], told["failures"]) == (2, 1, ["status 429"])
    assert (told["tokens_per_s"], told["requests_per_s"]) == (4.0, 1.0)
    assert told["first_token_s"]["p50"] == pytest.approx(0.2)
    assert told["between_chunks_s"]["p50"] == pytest.approx(0.15)
    assert told["per_token_s"]["p99"] == pytest.approx(0.06)
    assert told["request_s"]["p99"] == pytest.approx(0.499)
    assert told["mean_acceptance_length"] == 1 + 5 / 4


def test_of_nothing_there_are_no_percentiles():
    assert percentiles([]) is None
    assert figures([Reply(failure="x")], 1.0)["first_token_s"] is None


def test_a_reply_holds_what_the_server_said():
    with live(toy_app()) as url:
        host, port = url.removeprefix("http://").split(":")
        body = {"prompt": "once", "max_tokens": 20, "seed": 1, "ignore_eos": True}
        good = asyncio.run(complete(host, int(port), body))
        bad = asyncio.run(complete(host, int(port), body | {"nonsense": 1}))
    gone = asyncio.run(complete(host, int(port), body))
    assert good.failure is None
    assert good.num_tokens == 20
    assert 1 < len(good.chunk_s) <= 20
    assert sorted(good.chunk_s) == list(good.chunk_s)
    assert good.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert bad.failure.startswith("status HTTP/1.1 400")
    assert "nonsense" in bad.failure
    assert gone.failure.startswith("no connection")


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(MongeError, match="did not start: .*no folder './missing'"),
        running(["./missing"]),
    ):
        pytest.fail("it is running")


def test_settings_that_cannot_be():
    with pytest.raises(OptionError, match="at least 1"):
        LoadSettings(concurrency=(0,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "nameless"], "write `name: arguments of monge serve`"),
        (["--beside", "x"], "write `name: address or command`"),
        (["--beside", "x: serve"], "has {port} where the port goes"),
        (["--beside", "x: https://h:1"], "named as http://host:port"),
        (["--beside", "on: http://h:1"], "name every server once"),
        (
            ["--fields", "x: {}"],
            "--fields 'x': no server has this name; there are off, on, adaptive",
        ),
        (
            ["--beside", "x: http://h:1", "--fields", "x: [1]"],
            "a JSON object is expected; got '[1]'",
        ),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be(arguments, message):
    result = CliRunner().invoke(app, ["bench", "serve", "--no-plots", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


OTHER = r"""
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(json.dumps({"version": "9.9"} if self.path == "/version" else {"data": []}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert "ignore_eos" not in body and body["generation_config"] == "never ends", body
        chunks = [{"choices": [{"text": "a"}]}] * (body["max_tokens"] - 1)
        chunks.append({"choices": [{"text": "a"}], "usage": {"completion_tokens": body["max_tokens"]}})
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_another_engine_is_asked_in_its_own_words(tmp_path, monkeypatch):
    @contextmanager
    def toy(arguments):
        with live(toy_app()) as url:
            host, port = url.removeprefix("http://").split(":")
            yield Server(host=host, port=int(port))

    monkeypatch.setattr(bench, "running", toy)
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    result = CliRunner().invoke(
        app,
        [
            *(
                "bench",
                "serve",
                "--concurrency",
                "2",
                "--requests",
                "1",
                "--max-tokens",
                "6",
                "--repeats",
                "1",
            ),
            *(
                "--arm",
                "off:",
                "--beside",
                f"other: {sys.executable} {other} {{port}}",
                "--out",
                str(tmp_path),
            ),
            *("--fields", 'other: {"ignore_eos": null, "generation_config": "never ends"}'),
        ],
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "serve.json").read_text())
    off, beside = document["cells"]
    assert document["besides"]["other"]["version"] == "9.9"
    assert (off["arm"], beside["arm"], beside["runs"][0]["num_failed"]) == ("off", "other", 0)
    assert beside["runs"][0]["mean_acceptance_length"] is None
    assert (tmp_path / "serve.png").stat().st_size > 0
    assert "other" in result.stdout


def test_another_engine_that_does_not_start_says_why(monkeypatch):
    ends = f"{sys.executable} -c 'raise SystemExit(\"no such model\")' {{port}}"
    for where, message in (
        (ends, "ended with status 1: no such model"),
        ("./missing {port}", "cannot be started"),
    ):
        with pytest.raises(MongeError, match=message), running_beside(Beside(where=where), ()):
            pytest.fail("it is running")
    with (
        pytest.raises(MongeError, match="nothing answers"),
        running_beside(Beside(where="http://127.0.0.1:1"), ()),
    ):
        pytest.fail("it is running")


def test_a_reply_of_another_length_says_nothing_about_speed():
    assert "5 tokens came where 6" in bench._of_length(Reply(num_tokens=5), 6).failure
    assert bench._of_length(Reply(num_tokens=6), 6).failure is None


def test_each_repeat_begins_with_another_server_and_all_repeats_make_one_ratio(monkeypatch):
    order = []

    @contextmanager
    def started(arguments):
        yield Server(host=arguments[0], port=1)

    def load(server, _prompts, _settings, clients):
        order.append((server.host, clients))
        speed = {"slow": 10.0, "fast": 20.0}[server.host]
        return {"tokens_per_s": speed, "tokens_per_processor_s": None, "num_failed": 0}

    monkeypatch.setattr(bench, "running", started)
    monkeypatch.setattr(bench, "_load", load)
    settings = LoadSettings(concurrency=(1, 2), repeats=3, server=())
    document = measure({"slow": ("slow",), "fast": ("fast",)}, ["text"], settings)
    assert [name for name, clients in order[2:] if clients == 1] == [
        "slow",
        "fast",
        "fast",
        "slow",
        "slow",
        "fast",
    ]
    assert [(cell["concurrency"], cell["arm"]) for cell in document["cells"]] == [
        (1, "slow"), (1, "fast"), (2, "slow"), (2, "fast"),
    ]  # fmt: skip
    assert document["cells"][1]["ratio_of_all"] == {"mean": 2.0, "low": 2.0, "high": 2.0}


def test_arms_that_are_started_alike_share_a_server(monkeypatch):
    ports, asked = itertools.count(1), []

    @contextmanager
    def started(arguments):
        yield Server(host="h", port=next(ports))

    def load(server, *_):
        asked.append((server.port, server.body({"seed": 1})))
        return {"tokens_per_s": 1.0, "tokens_per_processor_s": None, "num_failed": 0}

    monkeypatch.setattr(bench, "running", started)
    monkeypatch.setattr(bench, "_load", load)
    fields = {"off": {"speculation": False}}
    settings = LoadSettings(concurrency=(1,), repeats=1, server=())
    document = measure(
        {"off": ("a",), "on": ("a",), "other": ("b",)}, ["text"], settings, fields=fields
    )
    assert asked[3:] == [(1, {"seed": 1, "speculation": False}), (1, {"seed": 1}), (2, {"seed": 1})]
    assert document["fields"] == fields


@pytest.mark.slow
def test_two_arms():
    settings = LoadSettings(concurrency=(2,), per_client=1, max_tokens=4, repeats=1, server=())
    document = measure({"off": ("--drafter", "none"), "on": ()}, ["The history of"], settings)
    json.dumps(document, allow_nan=False)
    off, on = document["cells"]
    assert (off["arm"], on["arm"], on["concurrency"]) == ("off", "on", 2)
    assert off["ratio"]["median"] == 1.0
    assert off["runs"][0]["mean_acceptance_length"] is None
    assert on["runs"][0]["mean_acceptance_length"] >= 1
    assert [run["num_requests"] for run in (*off["runs"], *on["runs"])] == [2, 2]
