"""Bad input, retries, resumption, and the command."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from monge.audit.client import Client, RefusedError, ServerError
from monge.audit.references import LocalReference, ServerReference, token_names
from monge.audit.report import Report, page
from monge.audit.run import audit, in_order, probe
from monge.audit.settings import AuditSettings
from monge.audit.situations import Situation
from monge.cli.app import app
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.oracle.tabular import TabularModel
from tests.audit.toy import EOS_NAMES, PROMPTS, client_of, judge, local_reference
from tests.kit.wrong_engines import END, EXACT_ENGINES, TARGET, VOCAB, PlainEngine, ToyTable
from tests.kit.wrong_servers import Letters, ToyServer

PLAIN, GREEDY, OTHER = EXACT_ENGINES["plain"], PlainEngine(is_greedy=True), ToyTable(5)
SHORT = (Situation(name="short", prompts=PROMPTS),)
UNJUDGED, ENDLESS = "could not be judged", {"is_local": False, "knows_end": False}


def answering(status: int, content: object) -> dict[str, Any]:
    """Options of a client whose server always answers so."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=content))
    return {"url": "http://broken", "model": "m", "transport": transport}


def test_refused_requests_come_again():
    report = judge(ToyServer(PLAIN, num_refused=5), budget=600)
    assert report.verdict == "lossless"


def test_a_server_that_dies_is_described():
    plain = ToyServer(PLAIN)

    class Dying:
        num_sampled = 0

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            """Answers 500 to a sampled request, and afterwards is gone."""
            self.num_sampled += scope["path"].endswith("/completions")
            if self.num_sampled > 60:
                raise httpx.ConnectError("refused")
            if self.num_sampled == 60:
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b"the engine is dead"})
            else:
                await plain(scope, receive, send)

    async def run() -> None:
        transport = httpx.ASGITransport(app=Dying())
        async with Client("http://toy", attempts=2, transport=transport) as client:
            await audit(client, local_reference(), AuditSettings(budget=10**4, situations=SHORT))

    said = "status 500: the engine is dead, then ConnectError: refused .in situation 'short', after"
    with pytest.raises(ServerError, match=said):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"url": "http://127.0.0.1:9"}, ServerError, "127.0.0.1:9"),
        ({"url": "localhost:8000"}, RefusedError, "is no address of a server"),
        ({"url": "ftp://a"}, RefusedError, "is no address of a server"),
        ({"url": "http://a:bad"}, RefusedError, "is no address of a server"),
        (answering(200, {"data": []}) | {"model": None}, ServerError, "name one with --model"),
        (answering(400, {"error": "no such model"}), RefusedError, "no such model"),
        (answering(500, {"error": "no memory"}), ServerError, "after 1 attempts.*no memory"),
        (answering(200, {"detail": "nothing"}), ServerError, "has no completion"),
        (answering(200, {"choices": [{"text": ""}]}), ServerError, "empty texts"),
        (answering(200, [1, 2]), RefusedError, "does not answer in JSON"),
    ],
)
def test_bad_servers_and_answers_are_errors(options, kind, match):
    async def ask() -> None:
        async with Client(attempts=1, **options) as client:
            await probe(client, "abc")

    with pytest.raises(kind, match=match):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("server", "options", "verdict", "said"),
    [
        (ToyServer(PLAIN, logprobs=False), {"budget": 300}, UNJUDGED, "`logprobs`"),
        (ToyServer(GREEDY, logprobs=False), {"budget": 1000}, "not lossless", "`logprobs`"),
        (ToyServer(PlainEngine(target=OTHER), table=OTHER), {}, UNJUDGED, "same weights"),
        (ToyServer(PLAIN, table=OTHER), {"budget": 600}, "lossless", "log-probabilities"),
        (ToyServer(PLAIN), {"budget": 3000} | ENDLESS, UNJUDGED, "--eos"),
    ],
    ids=["no tokens", "greedy, no tokens", "other weights", "wrong log-probabilities", "no end"],
)
def test_what_a_server_does_not_tell_is_said(server, options, verdict, said):
    report = judge(server, **options)
    assert report.verdict == verdict
    assert said in "; ".join([report.reason, *report.notes])


def test_a_reference_needs_logprobs_of_prompts():
    async def ask() -> None:
        async with client_of(ToyServer(PLAIN, logprobs=False)) as client:
            await ServerReference(client, eos_names=EOS_NAMES).laws("abc", ["a"], SamplingRules())

    with pytest.raises(ServerError, match="--target"):
        asyncio.run(ask())


def test_the_references_of_an_audit_agree():
    async def both() -> None:
        async with client_of(ToyServer(PLAIN)) as client:
            twin = ServerReference(client, eos_names=EOS_NAMES, num_top=12)
            settings = {}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}
            for seed in range(5):
                options = {"max_tokens": 8, "temperature": 1.0, "logprobs": 1, "seed": seed}
                names = token_names(await client.complete("abc", **options), EOS_NAMES)
                for rules in (SamplingRules(**one) for one in settings):
                    others = await twin.laws("abc", names, rules)
                    own = await local_reference().laws("abc", names, rules)
                    for theirs, ours in zip(others, own, strict=True):
                        if theirs is not None and ours is not None:
                            assert theirs.names[:3] == ours.names[:3]
                            assert theirs.probs[:3] == pytest.approx(ours.probs[:3], abs=1e-9)

    asyncio.run(both())


def test_an_audit_is_continued(tmp_path):
    server, log = ToyServer(PLAIN), tmp_path / "texts.jsonl"

    async def run(budget: int) -> tuple[Report, int]:
        async with client_of(server) as client:
            before = server.num_requests
            settings = AuditSettings(budget=budget, situations=SHORT, log=log)
            report = await audit(client, local_reference(), settings)
            return report, server.num_requests - before

    first, num_first = asyncio.run(run(640))
    log.write_text(log.read_text() + '{"situation": "sho')  # the last line was cut off
    again, num_again = asyncio.run(run(640))
    assert (again.num_tokens, again.log_e) == (first.num_tokens, first.log_e)
    # The first stages are asked again, the texts are not.
    assert num_again == 2 * len(PROMPTS) < num_first
    longer, _ = asyncio.run(run(1280))
    assert longer.num_tokens > first.num_tokens
    assert all(json.loads(line) for line in log.read_text().splitlines() if line.endswith("}"))


@pytest.mark.parametrize("content", ["no json\n", '{"url": "another"}\n'])
def test_a_log_of_something_else_is_refused(tmp_path, content):
    log = tmp_path / "texts.jsonl"
    log.write_text(content)
    with pytest.raises(OptionError, match="name another file"):
        judge(ToyServer(PLAIN), budget=100, log=log)


def test_results_come_in_order():
    async def slow(index: int) -> int:
        await asyncio.sleep(0.01 * (5 - index % 5))
        return index

    async def every() -> list[int]:
        return [one async for one in in_order((slow(index) for index in range(12)), 4)]

    assert asyncio.run(every()) == list(range(12))


def test_a_cancelled_forward_ends_before_the_next_one_begins():
    ended, at_once = threading.Event(), list[bool]()

    class Slow(TabularModel):
        is_busy = False

        def extend(self, blocks: Any) -> Any:
            at_once.append(self.is_busy)
            self.is_busy = True
            ended.wait(10)
            self.is_busy = False
            return super().extend(blocks)

    reference = LocalReference(Slow(TARGET, VOCAB), Letters(), frozenset({END}))

    async def both() -> None:
        asked = [reference.laws("abc", ["a"], SamplingRules()) for _ in range(2)]
        first, second = map(asyncio.ensure_future, asked)
        while not at_once:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.sleep(0.01)
        ended.set()
        await second
        assert first.cancelled()

    asyncio.run(both())
    assert at_once == [False, False]


def test_the_page_shows_the_verdict():
    report = judge(ToyServer(PLAIN), budget=600)
    text = page(report, "http://<server>", "a twin")
    assert "<h1>Lossless</h1>" in text
    assert "http://&lt;server&gt;" in text
    assert text.count("<svg") == 2


@pytest.mark.parametrize(("is_greedy", "status"), [(False, 0), (True, 1)])
def test_the_command_judges(is_greedy, status, monkeypatch, tmp_path):
    judged = ToyServer(PlainEngine(is_greedy=is_greedy))
    servers = {"http://a": judged, "http://b": ToyServer(PLAIN)}
    real = Client.__init__

    def in_process(self, url, **options):
        real(self, url, transport=httpx.ASGITransport(app=servers[url]), **options)

    monkeypatch.setattr(Client, "__init__", in_process)
    monkeypatch.setattr("monge.audit.settings.usual_situations", lambda *, is_quick: SHORT)
    html = tmp_path / "audit.html"
    command = "audit --url http://a --reference-url http://b --quick --budget 640 --eos <end>"
    result = CliRunner().invoke(app, [*command.split(), "--html", str(html), "--json"])
    assert result.exit_code == status, result.output
    assert json.loads(result.stdout)["verdict"] == ("not lossless" if is_greedy else "lossless")
    assert html.read_text().startswith("<!doctype html>")
