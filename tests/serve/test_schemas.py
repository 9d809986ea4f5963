"""Every field is honoured, neutral or refused by name; what is not listed is refused too."""

import json

import pytest
from pydantic import ValidationError

from monge.serve.api.errors import of_validation
from monge.serve.api.fields import MAX_CHOICES, MAX_STOPS
from monge.serve.api.schemas import ChatRequest, CompletionRequest

TURNS = [{"role": "user", "content": "Hello"}]
STARTS = {CompletionRequest: {"prompt": "Once"}, ChatRequest: {"messages": TURNS}}
NEUTRAL = [
    (model, name)
    for model in STARTS
    for name, field in model.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
]
"""Fields that may only ask for nothing."""


def made(model=CompletionRequest, /, **fields):
    return model.model_validate(STARTS[model] | fields)


def error_of(model=CompletionRequest, /, **fields):
    with pytest.raises(ValidationError) as caught:
        made(model, **fields)
    return of_validation(caught.value.errors())


@pytest.mark.parametrize(("model", "name"), NEUTRAL)
def test_neutral_values_pass_and_others_are_refused_by_name(model, name):
    for value in model.model_fields[name].json_schema_extra["enum"]:
        assert getattr(made(model, **{name: value}), name) == value
    error = error_of(model, **{name: "something else"})
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(f"{name}: ")
    assert "leave it out or send null" in error.message
    assert "something else" not in error.message


def test_booleans_and_numbers_are_not_confused():
    assert error_of(best_of=True).param == "best_of"
    assert error_of(skip_special_tokens=1).param == "skip_special_tokens"
    assert made(length_penalty=1).length_penalty == 1


def test_unknown_fields_are_named_with_the_nearest_known_one():
    error = error_of(temprature=1, zzz=2)
    assert error.code == "unknown_parameter"
    assert "unknown field 'temprature'; did you mean 'temperature'?" in error.message
    assert "unknown field 'zzz'" in error.message
    other = error_of(ChatRequest, echo=True).message
    assert other == "unknown field 'echo': it belongs to another endpoint or another object"
    assert "'messages'" in error_of(message="a").message


WRONG = {
    "temperature": ["1", -0.5, True, float("nan"), float("inf"), [], {}],
    "top_p": [0, 1.5, "0.5"],
    "top_k": [-2, 1.5, "3", True],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [3],
    "repetition_penalty": [0, -1],
    "seed": [1.5, "1", 2**64, -(2**63) - 1, True],
    "n": [0, MAX_CHOICES + 1, 1.0],
    "stop": ["", [""], ["x"] * (MAX_STOPS + 1), ["x" * 1001], [1], {"a": 1}, "\ud800"],
    "logit_bias": [{"1": 101}, {"-1": 1}, {"a": 1}, {"1": "1"}, {"": 1}, [1], {"9" * 30: 1}],
    "max_tokens": [-1, 2**31, 1.5, "16"],
    "logprobs": [-1, 21, True],
    "echo": [1, "true"],
    "stream": [1],
    "stream_options": [1, []],
    "ignore_eos": ["yes"],
    "speculation": [0, "no", []],
    "user": [1, "x" * 513, "\ud800"],
    "model": [3],
    "prompt": [
        *(None, 3, [], [[]], [1, "a"], ["a", [1]], [True], [-1], [2**31]),
        *(["a"] * (MAX_CHOICES + 1), "\ud800", [[1], "a"]),
    ],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=repr,
)
def test_wrong_values_are_refused_by_name(name, value):
    error = error_of(**({"stream": True} if name == "stream_options" else {}) | {name: value})
    assert (error.status, error.param) == (400, name)
    json.dumps(error.body()).encode()


def turn(**fields):
    return {"messages": [TURNS[0] | fields]}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**fields):
    call = CALL | {"function": CALL["function"] | fields}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def tool(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


def named(name):
    return {"type": "function", "function": {"name": name}}


TOOL = tool()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: "),
        (turn(role="tool"), "messages.0.tool_call_id: belongs to role tool"),
        (turn(tool_call_id="a"), "messages.0.tool_call_id: belongs to role tool"),
        (turn(tool_calls=[CALL]), "messages.0.tool_calls: only of role assistant"),
        (said(arguments="[]"), "function.arguments: must be the text of a JSON object"),
        (said(arguments="{"), "function.arguments: must be the text of a JSON object"),
        (said(name="a b"), "messages.0.tool_calls.0.function.name: "),
        ({"tools": [TOOL, TOOL]}, "tools: two functions have one name"),
        ({"tools": [tool(parameters={"type": "string"})]}, "parameters: must be a JSON schema of"),
        ({"tools": [TOOL | {"type": "mcp"}]}, "tools.0.type: "),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"tools": [TOOL], "tool_choice": named("g")}, "tool_choice: there is no function 'g'"),
        ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice: input should be 'none', 'auto' or"),
        ({"functions": [{"name": "f"}]}, "functions: send tools"),
        (turn(content=None), "messages.0.content: "),
        (turn(weight=1), "unknown field 'messages.0.weight'"),
        ({"stream": True, "stream_options": {"more": 1}}, "unknown field 'stream_options.more'"),
        ({"top_logprobs": 2}, "top_logprobs: only with logprobs=true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens: differs from max_comp"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stream_options": {}}, "stream_options: only with stream=true"),
    ],
    ids=str,
)
def test_malformed_conversations_are_refused_by_field(fields, message):
    assert message in error_of(ChatRequest, **fields).message


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_no_text_is_named_in_one_sentence(kind):
    parts = [{"type": "text", "text": "x"}, {"type": kind}]
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]
    told = f"messages.1.content: part 1 is of type {kind!r}, and only text is read here"
    assert error_of(ChatRequest, messages=messages).message == told


@pytest.mark.parametrize(
    ("name", "sent", "kept"),
    [
        ("prompt", "a", ("a",)),
        ("prompt", ["a", "b"], ("a", "b")),
        ("prompt", [1, 2], ((1, 2),)),
        ("prompt", [[1], [2, 3]], ((1,), (2, 3))),
        ("stop", None, ()),
        ("stop", [], ()),
        ("stop", "x", ("x",)),
        ("stop", ["x", "y"], ("x", "y")),
    ],
)
def test_single_values_and_lists_of_prompts_and_stops_become_tuples(name, sent, kept):
    assert getattr(made(**{name: sent}), name) == kept
    assert made().stop == ()


def test_both_names_of_the_token_limit_are_accepted_if_equal():
    made(ChatRequest, max_tokens=2, max_completion_tokens=2, logprobs=True, top_logprobs=2)


def test_many_errors_and_long_names_are_cut_short():
    error = error_of(**{f"field{number}": 1 for number in range(9)})
    assert error.message.endswith("; and more")
    assert len(error_of(**{"x" * 100_000: 1}).message) < 200
