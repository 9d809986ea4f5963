"""`assert_lossless` in a test suite, and engines that an audit starts itself."""

import asyncio
import json
import re
import unittest
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from monge.audit import InconclusiveError, assert_lossless
from monge.audit.client import Client, ServerError
from monge.audit.engines import ASSISTED, HOW_TO_START, LOOKUP, STARTED, TransformersEngine
from monge.audit.gate import audited
from monge.audit.settings import AuditSettings
from monge.audit.situations import Situation
from monge.cli.app import app
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from tests.audit.toy import EOS_NAMES, PROMPTS, local_reference
from tests.kit.wrong_engines import EXACT_ENGINES, WRONG_ENGINES, PlainEngine, ToyTable
from tests.kit.wrong_servers import LETTERS, Letters, ToyServer

SHORT = (Situation(name="16 at once", prompts=PROMPTS, concurrency=16),)
TWO = (
    Situation(name="one", prompts=PROMPTS),
    Situation(name="another", prompts=PROMPTS, rules=SamplingRules(top_k=4)),
)


class OwnDefaults(ToyServer):
    """A server with a default of its own for top-k, which does not know `min_p`."""

    def _answer(self, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "min_p" in fields:
            return 400, {"error": {"message": "unknown field min_p"}}
        return super()._answer({"top_k": 3, **fields})


def place(server: ToyServer, url: str = "http://toy") -> dict[str, object]:
    return {"url": url, "transport": httpx.ASGITransport(app=server)}


def twin() -> dict[str, object]:
    return place(ToyServer(EXACT_ENGINES["plain"], seed=99), "http://twin")


@pytest.mark.parametrize("engine", ["plain", "single draft", "own defaults"])
def test_exact_servers_pass(engine, tmp_path):
    """Defaults of a server are no faults."""
    kind = OwnDefaults if engine == "own defaults" else ToyServer
    server = place(kind(EXACT_ENGINES.get(engine, EXACT_ENGINES["plain"]), seed=3))
    options = {"budget": 1000, "situations": SHORT, "eos": EOS_NAMES}
    report = assert_lossless(server, twin(), **options, out=tmp_path / "report.json")
    assert report.verdict == "lossless"
    assert report.num_tokens >= 1000
    assert json.loads((tmp_path / "report.json").read_text())["num_tokens"] == report.num_tokens


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("typical acceptance", "log e-value"),
        ("sampled requests decoded greedily", "log e-value"),
        ("every draft accepted", "greedy text"),
    ],
)
def test_wrong_servers_fail(name, found, tmp_path):
    page, server = tmp_path / "report.html", place(ToyServer(WRONG_ENGINES[name], seed=1))
    options = {"budget": 6000, "situations": SHORT, "eos": EOS_NAMES}
    message = "(?s)http://toy against http://twin: not lossless"
    with pytest.raises(AssertionError, match=message) as raised:
        assert_lossless(server, twin(), **options, out=page)
    assert found in page.read_text() or "E-value" in page.read_text()
    text = str(raised.value)
    if found == "log e-value":
        assert re.search(r"log e-value \d+\.\d \(rejected at 6\.9, alpha 0\.001\)", text)
        assert "situation '16 at once'" in text
        assert "mean total variation of" in text


@pytest.mark.parametrize(
    ("inconclusive", "kind"), [("fail", InconclusiveError), ("skip", unittest.SkipTest)]
)
def test_a_server_that_cannot_be_judged_neither_passes_nor_fails(inconclusive, kind):
    other = ToyTable(5)
    server = ToyServer(PlainEngine(target=other), table=other)
    options = {"situations": SHORT, "eos": EOS_NAMES, "inconclusive": inconclusive}
    with pytest.raises(kind, match="could not be judged.*same weights"):
        assert_lossless(place(server), twin(), **options)


def test_a_clock_ends_an_audit():
    server = ToyServer(EXACT_ENGINES["plain"], seed=4, latency_s=0.01)
    settings = AuditSettings(situations=TWO, minutes=0.01)
    report = asyncio.run(audited(place(server), local_reference(), settings))
    assert report.num_tokens < settings.num_tokens
    assert all(one.num_texts > 0 for one in report.situations)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"alpha": 0.0}, "alpha must lie between 0 and 1"),
        ({"budget": 0}, "budgets must be positive"),
        ({"minutes": -1.0}, "minutes must be positive"),
        ({"inconclusive": "pass"}, "must be .fail. or .skip."),
        ({"server": {"model": "m"}}, "name no server"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    usual = {"server": place(ToyServer(PlainEngine())), "reference": twin()}
    with pytest.raises(OptionError, match=match):
        assert_lossless(**usual | options)


def test_more_greedy_tokens_are_compared_on_request():
    server = place(ToyServer(EXACT_ENGINES["single draft"], seed=5))
    budgets = {"budget": 600, "greedy_budget": 500}
    report = assert_lossless(server, local_reference(), **budgets, situations=SHORT)
    assert report.deterministic is not None
    assert 500 <= report.deterministic.num_greedy < 700


def test_logprobs_written_as_in_chats_are_read():
    content = [{"token": " a", "logprob": -0.5, "bytes": [32, 97], "top_logprobs": []}]
    choice = {"text": " a", "finish_reason": "length", "logprobs": {"content": content}}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v3/completions"
        return httpx.Response(200, json={"choices": [choice]})

    async def ask():
        transport = httpx.MockTransport(answer)
        async with Client("http://a/v3/", model="m", transport=transport) as client:
            return await client.complete("x")

    found = asyncio.run(ask())
    assert (found.tokens, found.logprobs) == ((" a",), (-0.5,))


@pytest.mark.parametrize("name", [ASSISTED, LOOKUP])
def test_transformers_is_audited_in_process(name):
    played = (Situation(name="alone", prompts=("The old lighthouse keeper",), max_tokens=8),)
    engine = TransformersEngine(name)
    report = assert_lossless(engine, {"target": "built-in"}, budget=60, situations=played)
    assert report.verdict == "lossless"
    assert report.num_tokens >= 60


def test_an_engine_gives_a_seeded_text_again_and_leaves_the_global_generator_alone():
    engine, state = TransformersEngine(LOOKUP), torch.random.get_rng_state()
    first, again, other = (
        asyncio.run(engine.complete("The", max_tokens=8, temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


A, AB = "--url http://a", "--url http://a --reference-url http://b"
JUDGED = f"{A} --target built-in"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("", "--url, or --engine"),
        ("--engine foo", f"unknown engine 'foo'; known: {', '.join(STARTED)}"),
        (f"--engine monge {A}", "leave --url and --reference-url out"),
        (f"--engine {LOOKUP} --tree chain", "options of --engine monge"),
        (f"--engine {LOOKUP} --draft built-in", "takes no draft model"),
        (f"--engine {ASSISTED} --target .", "needs a draft model"),
        (f"{JUDGED} --tree chain", "need --engine"),
        (f"{AB} --draft .", "--draft needs --engine or --target"),
        (A, "either --reference-url or --target"),
        (f"{AB} --target built-in", "either --reference-url or --target"),
        ("--url http://a/ --reference-url http://a", "is the audited server"),
        (f"{JUDGED} --alpha 2", "alpha must lie between 0 and 1"),
        (f"{JUDGED} --budget 0", "--budget"),
        (f"{JUDGED} --situation x", "unknown situation 'x'; known: 'first tokens'"),
        *(
            (f"--engine {name}", f"start its server with `{start[0].split()[0]}")
            for name, start in HOW_TO_START.items()
        ),
    ],
)
def test_the_command_refuses(arguments, match):
    result = CliRunner().invoke(app, ["audit", *arguments.split()])
    assert result.exit_code == 2
    assert match in re.sub(r"\s+", " ", result.stderr)


def test_our_engine_by_the_command(monkeypatch):
    played = (Situation(name="seeds", prompts=("The old", "A new"), max_tokens=8, is_seeded=True),)
    monkeypatch.setattr("monge.audit.settings.usual_situations", lambda *, is_quick: played)
    command = "audit --engine monge --quick --budget 60 --tree chain(2) --verifier block --controller fixed --json"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "/v1/completions" not in result.stderr, "a line for every request"
    report = json.loads(result.stdout)
    assert report["verdict"] == "lossless"
    assert report["num_tokens"] >= 60


class LikeLlama(ToyServer):
    """Answers as llama.cpp does.

    It ignores `echo`, reads prompts of text and ids, lists tokens with their ids, and gives no
    log-probabilities of drafted tokens.
    """

    def _answer(self, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        given = fields["prompt"]
        text, *ids = [given] if isinstance(given, str) else given
        asked = fields | {"prompt": [*Letters()(text)["input_ids"], *ids], "echo": False}
        status, answer = super()._answer(asked | {"return_tokens_as_token_ids": True})
        choice = answer["choices"][0]
        if (listed := choice.pop("logprobs", None)) is not None:
            names = ("tokens", "token_logprobs", "top_logprobs")
            rows = zip(*(listed[name] for name in names), strict=True)
            content = []
            for place, (name, logprob, top) in enumerate(rows):
                is_own = place % 2 == 0  # the others were drafted
                entries = [self._entry(*pair) for pair in top.items()] if is_own else []
                entry = self._entry(name, logprob if is_own else 0.0)
                content.append(entry | {"top_logprobs": entries})
            choice["logprobs"] = {"content": content}
        return status, answer

    @staticmethod
    def _entry(name: str, logprob: float) -> dict[str, Any]:
        token = int(name.removeprefix("token_id:"))
        return {"id": token, "token": LETTERS[token], "logprob": logprob}


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        (EXACT_ENGINES["single draft"], "lossless"),
        (WRONG_ENGINES["sampled requests decoded greedily"], "not lossless"),
    ],
)
def test_a_twin_like_llama_cpp_is_asked_for_every_token(engine, verdict):
    settings = AuditSettings(budget=400, situations=SHORT)
    server = place(LikeLlama(engine, seed=3, by_id=True))
    other = place(LikeLlama(EXACT_ENGINES["plain"], by_id=True), "http://twin")
    report = asyncio.run(audited(server, other, settings, eos={"token_id:0"}))
    assert report.verdict == verdict, report.reason
    assert any("log-probabilities" in note for note in report.notes)


def test_a_twin_like_llama_cpp_needs_the_id_of_the_end():
    server = place(LikeLlama(EXACT_ENGINES["plain"], by_id=True))
    other = place(LikeLlama(EXACT_ENGINES["plain"], by_id=True), "http://twin")
    with pytest.raises(ServerError, match="--eos token_id:2"):
        assert_lossless(server, other, budget=800, situations=SHORT)
