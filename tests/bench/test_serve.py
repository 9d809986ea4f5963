"""The load generator counts what was sent, and tells failures from numbers."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from monge.bench.serve import LoadSettings, figures, measure, percentiles, running
from monge.bench.serve_client import Reply, complete
from monge.cli.app import app
from monge.core.errors import MongeError, OptionError
from tests.serve.served import live, toy_app


def spec(steps, accepted):
    return {"speculative_decoding": {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}}


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
    with pytest.raises(MongeError, match="did not start: .*no folder './missing'"), running(["./missing"]):
        pytest.fail("it is running")


def test_settings_that_cannot_be():
    with pytest.raises(OptionError, match="at least 1"):
        LoadSettings(concurrency=(0,))
    result = CliRunner().invoke(app, ["bench", "serve", "--arm", "nameless"])
    assert result.exit_code == 2
    assert "write `name: arguments of monge serve`" in result.stderr


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
