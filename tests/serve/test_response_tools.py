"""Functions in `/v1/responses`: the calls of the chat endpoint, as items and events that the official client reads."""

import json

import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.serve.served import writing_app
from tests.serve.test_tools import TOOL, check

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function"} | TOOL["function"]
OTHER = {"type": "function", "name": "f", "description": "Does nothing."}
ASKED = {"model": "toy", "input": "Will it rain in Rome?", "max_output_tokens": 300}


def events_of(web, body):
    """Events that have all that the official types require, in the order of their numbers."""
    answer = web.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def rebuilt(events):
    """The items that the events add up to."""
    items, pieces = [], {}
    for event in events:
        kind, place = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert place == len(items)
            items.append(event["item"])
            pieces[place] = ""
            assert event["item"]["status"] == "in_progress"
        elif kind in {"function_call_arguments.delta", "output_text.delta"}:
            assert items[place]["status"] == "in_progress"
            assert event["item_id"] == items[place]["id"]
            pieces[place] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["item_id"]) == (pieces[place], items[place]["id"])
        elif kind == "output_text.done":
            assert event["text"] == pieces[place]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[place]["id"]
            items[place] = event["item"]
    assert events[-1]["response"]["output"] == items
    return items


def calls_of(items):
    return [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
@pytest.mark.parametrize("is_parallel", [False, None])
def test_forced_calls_are_those_of_the_chat(web, choice, is_parallel):
    tools = [WEATHER, OTHER | {"parameters": WEATHER["parameters"]}]
    fields = {"seed": 2, "temperature": 1, "parallel_tool_calls": is_parallel}
    body = ASKED | fields | {"tools": tools, "tool_choice": choice}
    answer = web.post("/v1/responses", json=body).json()
    Response.model_validate(answer)
    is_cut = answer["status"] == "incomplete"
    calls = calls_of(answer["output"])
    names = ("f",) if isinstance(choice, dict) else ("f", "get_weather")
    check(calls[:-1] if is_cut else calls, names)
    named = choice if isinstance(choice, str) else {"type": "function", "function": {"name": "f"}}
    chat = {"messages": [{"role": "user", "content": ASKED["input"]}], "max_tokens": 300}
    bare = {name: value for name, value in tools[1].items() if name != "type"}
    chat |= {"tool_choice": named, "tools": [TOOL, {"type": "function", "function": bare}]}
    (told,) = web.post("/v1/chat/completions", json=fields | chat).json()["choices"]
    functions = [one["function"] for one in told["message"]["tool_calls"]]
    assert calls == [(one["name"], one["arguments"]) for one in functions]
    assert answer["tool_choice"] == choice
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "f"]
    assert answer["parallel_tool_calls"] is (is_parallel is not False)
    events = events_of(web, body)
    assert calls_of(rebuilt(events)) == calls
    assert not [event for event in events if "text" in event["type"]], "no empty message"


def test_a_call_that_is_cut_is_incomplete(web):
    body = ASKED | {"tools": [WEATHER], "tool_choice": "required", "seed": 2}
    body["max_output_tokens"] = 33
    events = events_of(web, body)
    (call,) = rebuilt(events)
    assert (call["status"], events[-1]["type"]) == ("incomplete", "response.incomplete")
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    (whole,) = web.post("/v1/responses", json=body).json()["output"]
    assert whole["arguments"] == call["arguments"]


class City(BaseModel):
    """Where it may rain."""

    city: bool


def test_the_official_client_runs_an_agent_to_its_end(official):
    tool = {"type": "function"} | openai.pydantic_function_tool(City)["function"]
    history = [{"role": "user", "content": ASKED["input"]}]
    fields = {"model": "toy", "tools": [tool], "parallel_tool_calls": False, "store": False}
    fields |= {"include": ["reasoning.encrypted_content"], "max_output_tokens": 80}
    for choice in ("required", "none"):
        if choice == "none":
            answer = official.responses.create(**fields, input=history, tool_choice=choice)
        else:
            with official.responses.stream(**fields, input=history, tool_choice=choice) as events:
                answer = events.get_final_response()
        history += answer.output
        for item in answer.output:
            if item.type == "function_call":
                assert set(item.parsed_arguments) == {"city"}
                result = {"type": "function_call_output", "call_id": item.call_id, "output": "Yes."}
                history.append(result)
    assert [getattr(item, "type", None) or item.get("type") for item in history] == [
        *(None, "function_call", "function_call_output", "message")
    ]
    assert answer.output_text


@pytest.mark.parametrize("is_merged", [False, True])
def test_items_are_the_turns_of_a_chat(web, is_merged):
    made = {"c1": {"name": "f", "arguments": '{"a": 1}'}, "c2": {"name": "f", "arguments": "{}"}}
    calls = [{"id": name, "type": "function", "function": one} for name, one in made.items()]
    content = "Well" if is_merged else None
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Wind"},
    ]
    said = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1"}
    said |= {"content": [{"type": "output_text", "text": "Well"}]}
    result, wind = {"type": "function_call_output"}, [{"type": "input_text", "text": "Wind"}]
    items = [
        {"role": "user", "content": "Hi"},
        *([said] if is_merged else []),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        *({"type": "function_call", "id": f"f{n}", "call_id": n} | one for n, one in made.items()),
        result | {"call_id": "c1", "output": "Rain"},
        result | {"call_id": "c2", "output": wind},
    ]
    tool = {"name": "f", "parameters": {"type": "object"}}
    fields = {"seed": 1, "temperature": 1}
    tools = [{"type": "function", "function": tool}]
    chat = {"messages": messages, "max_tokens": 5, "tools": tools}
    answer = web.post("/v1/chat/completions", json=fields | chat).json()
    body = {"input": items, "max_output_tokens": 5, "tools": [{"type": "function"} | tool]}
    response = web.post("/v1/responses", json=fields | body).json()
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    text = answer["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "mc"),
        (2 * '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "cc"),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\n', "m"),
        ("Nothing to call.", "m"),
        ("", "m"),
    ],
)
def test_calls_that_a_model_makes_by_itself_are_items(text, kinds):
    with TestClient(writing_app(text)) as web:
        items = rebuilt(events_of(web, ASKED | {"tools": [OTHER]}))
        whole = web.post("/v1/responses", json=ASKED | {"tools": [OTHER]}).json()
    assert "".join(item["type"][0].replace("f", "c") for item in items) == kinds
    assert {item["status"] for item in items} == {"completed"} == {whole["status"]}
    for item in [*items, *whole["output"]]:  # ids are made of the answer's
        assert item.pop("id")
        assert (item.pop("call_id", None) is None) is (item["type"] == "message")
    assert items == whole["output"]
