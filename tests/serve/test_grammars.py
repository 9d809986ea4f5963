"""A grammar of one client harms that client only."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

import monge
from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.options import ServeOptions
from monge.serve.api import request_worker
from monge.serve.api.request_parser import RequestParser
from monge.serve.http.app import create_app
from monge.serve.http.service import GrammarTrials
from tests.serve.served import live, toy_app, wait_for
from tests.serve.test_ends import running

HEAVY = {"type": "integer", "multipleOf": 99999989}
"""150 bytes that would compile for minutes."""
GROWING = "[xy]a{1000000}"
"""Compiles at once; after some tokens the library gives up."""


@pytest.fixture(scope="module")
def app():
    decoder = monge.load(controller="fixed")
    return create_app(decoder, ServeOptions(served_model_name="toy"))


@pytest.fixture(scope="module")
def url(app):
    with live(app) as address:
        yield address


def ask(url, timeout=120, **fields):
    body = {"prompt": "JSON:", "max_tokens": 60, "seed": 1} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)


def children(pid):
    """Processes that a process has started and that have not ended."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def has_memory(pid):
    """Whether a process has not given back its memory, as one that ends has."""
    try:
        return not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def helper(monkeypatch):
    """The process that tries grammars, once it is started."""
    started, start = [], GrammarTrials._start

    def noted(self):
        start(self)
        started.append(self._process)

    monkeypatch.setattr(GrammarTrials, "_start", noted)
    return started


def test_a_grammar_that_compiles_too_long_is_refused_while_others_are_served(url):
    with ThreadPoolExecutor() as pool:
        heavy = pool.submit(ask, url, structured_outputs={"json": HEAVY})
        assert ask(url).status_code == 200
        answer = heavy.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "structured_outputs")
    assert "more than 2 s of processor time or 96 MiB" in error["message"]


def test_large_ones_of_many_clients_are_refused_one_after_the_other(helper):
    """Each takes 200 MB without a limit, and takes long at every token, while other texts wait."""
    large = [Grammar.regex(f"(x{{1000}}){{{number}}}") for number in range(400, 404)]
    trials = GrammarTrials(monge.load(controller="fixed").grammars)

    async def try_all():
        each = (trials.compile(one, one.text) for one in large)
        tried, most = asyncio.gather(*each, return_exceptions=True), 0
        while not tried.done():
            if helper:
                most = max(most, sum(map(has_memory, children(helper[0].pid))))
            await asyncio.sleep(0.005)
        return await tried, most

    errors, most = asyncio.run(try_all())
    trials.close()
    # One that has answered may still be ending while the next one begins.
    assert 1 <= most <= 2
    for error in errors:
        assert isinstance(error, OptionError)
        assert "96 MiB of memory" in str(error)


def test_a_grammar_that_crashes_the_library_is_refused(url):
    """Each definition takes a piece of the stack."""
    names = [f"a{number}" for number in range(3000)]
    chain = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | {names[-1]: {"type": "integer"}}}
    assert ask(url, structured_outputs={"json": schema}).status_code == 400
    assert httpx.get(f"{url}/health").status_code == 200


def test_tools_are_named_as_the_field(url):
    tool = {"name": "f", "parameters": {"properties": {"n": HEAVY}, "required": ["n"]}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_client_that_leaves_ends_what_is_compiled_for_it(helper):
    app = toy_app(monge.load(controller="fixed"))
    body = {"prompt": "a", "structured_outputs": {"json": HEAVY}}
    with live(app) as url, ThreadPoolExecutor() as pool:
        ask(url, structured_outputs={"regex": "a"})
        (process,) = helper
        client = httpx.Client()
        left = pool.submit(client.post, f"{url}/v1/completions", json=body)
        wait_for(lambda: children(process.pid))
        # Stopped, it cannot reach its limit of time: only its client's departure ends it.
        (child,) = children(process.pid)
        os.kill(child, signal.SIGSTOP)
        client.close()
        wait_for(lambda: not children(process.pid))
        assert process.poll() is None, "others use it still"
    assert left.exception() is not None


def test_the_process_that_ends_is_started_again(helper):
    with live(toy_app(monge.load(controller="fixed"))) as url:
        for pattern in "ab":
            assert ask(url, structured_outputs={"regex": pattern}).status_code == 200
            os.kill(helper[-1].pid, signal.SIGKILL)
            helper[-1].wait()
    assert len(helper) == 2


def test_giving_up_while_decoding_is_an_error_of_the_request_alone(url):
    for number in range(9):  # eight requests that fail in a row make a server unhealthy
        outputs = {"regex": GROWING + f"b{{{number}}}"}
        answer = ask(url, structured_outputs=outputs, temperature=0)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "grammar_not_followed"), error
        assert "too many expressions constructed" in error["message"]
    assert httpx.get(f"{url}/health").status_code == 200
    stream = ask(url, structured_outputs={"regex": GROWING}, stream=True)
    assert stream.status_code == 200
    assert "too many expressions constructed" in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")


def test_a_grammar_needs_a_tokenizer_that_the_library_reads():
    with live(toy_app()) as url:
        answer = ask(url, structured_outputs={"regex": "a"})
    assert answer.status_code == 400
    assert "got Letters" in answer.json()["error"]["message"]


@pytest.fixture
def stuck(monkeypatch):
    """Parsing takes until the event is set."""
    opened = threading.Event()

    def parse(*_, **__):
        opened.wait(60)
        raise OptionError("prompt: late")

    monkeypatch.setattr(RequestParser, "parse", parse)
    yield opened
    opened.set()


def test_a_server_whose_parsing_hangs_is_not_ready(stuck, monkeypatch):
    monkeypatch.setattr(request_worker, "_STUCK_S", 0.0)
    with live(toy_app()) as url, ThreadPoolExecutor() as pool:
        assert httpx.get(f"{url}/ready").status_code == 200
        hung = pool.submit(ask, url)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.get(f"{url}/health").status_code == 200
        stuck.set()
        assert hung.result().status_code == 400
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)


def test_parsing_that_hangs_does_not_keep_a_server_that_ends(stuck):
    with running(toy_app()) as (server, url), ThreadPoolExecutor() as pool:
        hung = pool.submit(ask, url)
        wait_for(lambda: any(one.name == "monge-requests" for one in threading.enumerate()))
        server.handle_exit(signal.SIGTERM, None)
        answer = hung.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert all(one.daemon for one in threading.enumerate() if one.name == "monge-requests")
