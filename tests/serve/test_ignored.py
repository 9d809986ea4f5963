"""What clients of agents send beside a conversation: it is honoured, or an answer's header says that it is not."""

import openai
import pytest
from fastapi.testclient import TestClient

import monge
from monge.options import ServeOptions
from monge.requests.chat_format import TemplateFormat
from monge.serve.http.app import create_app
from tests.serve.served import toy_app

IGNORED = "x-monge-ignored"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    RESPONSES: {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 3},
}
LABELS = ("user", "safety_identifier", "prompt_cache_key")
EVERYWHERE = [
    *((name, {name: "a label"}) for name in LABELS),
    ("store", {"store": True}),
    ("service_tier", {"service_tier": "flex"}),
    ("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
]
SAID = [("user", "hello"), ("assistant", "well"), ("user", "more")]
TURNS = [{"role": role, "content": content} for role, content in SAID]
CACHED = [{"type": "text", "text": "hello", "cache_control": {}}]
REASONING = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}


def turns(place, **fields):
    return [turn | fields if at == place else turn for at, turn in enumerate(TURNS)]


CASES = [
    *((path, name, fields) for path in BODIES for name, fields in EVERYWHERE),
    *((path, "metadata", {"metadata": {"a": "b"}}) for path in ("/v1/completions", CHAT)),
    (CHAT, "reasoning_effort", {"reasoning_effort": "high"}),
    (CHAT, "verbosity", {"verbosity": "low"}),
    (CHAT, "prediction", {"prediction": {"type": "content", "content": "hello"}}),
    (CHAT, "name", {"messages": turns(0, name="Ada")}),
    (CHAT, "reasoning_content", {"messages": turns(1, reasoning_content="Hm.")}),
    (CHAT, "reasoning", {"messages": turns(1, reasoning="Hm.")}),
    (CHAT, "cache_control", {"messages": turns(0, content=CACHED)}),
    (RESPONSES, "reasoning_effort", {"reasoning": {"effort": "low"}}),
    (RESPONSES, "summary", {"reasoning": {"summary": "auto"}}),
    (RESPONSES, "verbosity", {"text": {"verbosity": "low"}}),
    (RESPONSES, "include", {"include": ["reasoning.encrypted_content"]}),
    (RESPONSES, "truncation", {"truncation": "auto"}),
    (RESPONSES, "phase", {"input": turns(1, phase="final_answer", type="message")}),
    (RESPONSES, "reasoning", {"input": [*TURNS, REASONING]}),
]
ACCEPTED = {*LABELS, "metadata"}
"""Also by strict servers, since they are labels."""


@pytest.fixture(scope="module")
def strict():
    with TestClient(toy_app(strict=True)) as made:
        yield made


@pytest.mark.parametrize(("path", "name", "fields"), CASES, ids=str)
def test_a_field_is_ignored_with_a_header_or_refused(client, strict, path, name, fields):
    for stream in (False, True):
        answer = client.post(path, json=BODIES[path] | {"stream": stream} | fields)
        assert answer.status_code == 200, answer.text
        shown = set(answer.headers.get(IGNORED, "").split(", "))
        is_repeated = path == RESPONSES and name == "user"
        assert shown == ({""} if is_repeated else {name})
    answer = strict.post(path, json=BODIES[path] | fields)
    assert answer.status_code == (200 if name in ACCEPTED else 400), answer.text
    assert IGNORED not in answer.headers
    assert name in ACCEPTED or name.split("_")[-1] in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_neutral_fields_are_not_listed_and_misspelt_ones_are_refused(client, strict, path):
    fields = {"store": False, "service_tier": "auto", "user": None, "metadata": None}
    assert IGNORED not in client.post(path, json=BODIES[path] | fields).headers
    assert client.post(path, json=BODIES[path] | {"of_a_later_version": None}).status_code == 200
    assert strict.post(path, json=BODIES[path] | {"of_a_later_version": None}).status_code == 400
    assert client.post(path, json=BODIES[path] | {"temprature": 1}).status_code == 400


def test_an_agent_sends_back_all_that_it_got(client):
    web = openai.OpenAI(api_key="none", base_url="http://testserver/v1", http_client=client)
    history = list(TURNS[:1])
    for _ in range(2):
        answer = web.responses.create(model="toy", input=history, max_output_tokens=3)
        history += [item.model_dump() for item in answer.output]
        history += [answer.output[0], {"role": "user", "content": "more"}]
    labels = {"store": True, "metadata": {"run": "1"}, "user": "me"}
    labels |= {"reasoning_effort": "minimal", "verbosity": "low", "max_completion_tokens": 3}
    assert web.chat.completions.create(model="toy", messages=TURNS, **labels).choices


TEMPLATE = """{{ reasoning_effort }}{% for m in messages %}<|{{ m.role }}|>{{ m.name }}:
{{- m.reasoning_content }}{{ m.content }}{% endfor %}<|assistant|>"""


@pytest.fixture(scope="module", params=[False, True])
def templated(request):
    decoder = monge.load()
    decoder.chat_format = TemplateFormat(decoder.tokenizer, TEMPLATE)
    with TestClient(create_app(decoder, ServeOptions(strict=request.param))) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"messages": turns(0, name="Ada")}),
        (CHAT, {"messages": turns(1, reasoning_content="Hm.")}),
        (RESPONSES, {"reasoning": {"effort": "high"}}),
        (RESPONSES, {"input": turns(1, reasoning_content="Hm.")}),
    ],
    ids=str,
)
def test_fields_that_the_chat_template_reads_are_honoured(templated, path, fields):
    name = "input" if path == RESPONSES else "messages"
    plain = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2, name: TURNS}
    answers = [templated.post(path, json=body) for body in (plain, plain | fields)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert IGNORED not in answers[1].headers
    before, after = (answer.json()["usage"] for answer in answers)
    count = "input_tokens" if path == RESPONSES else "prompt_tokens"
    assert before[count] < after[count]
