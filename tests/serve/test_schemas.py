"""Every field is honoured, neutral or refused by name; what is not listed is refused too."""

import json

import pytest
from pydantic import ValidationError

from monge.serve.errors import of_validation
from monge.serve.fields import MAX_CHOICES, MAX_STOPS
from monge.serve.schemas import ChatRequest, CompletionRequest

TURNS = [{"role": "user", "content": "Hello"}]
REFUSED = [
    (model, name, field.json_schema_extra["enum"])
    for model in (CompletionRequest, ChatRequest)
    for name, field in model.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
]
"""Fields that may only ask for nothing, with the values that do."""


def completion(**fields):
    return CompletionRequest.model_validate({"prompt": "Once"} | fields)


def chat(**fields):
    return ChatRequest.model_validate({"messages": TURNS} | fields)


def error_of(make, **fields):
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    return of_validation(caught.value.errors())


def test_the_list_of_refused_fields_is_not_empty():
    assert len({name for _, name, _ in REFUSED}) > 25


@pytest.mark.parametrize(
    ("model", "name", "values"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_neutral_values_pass_and_others_are_refused_by_name(model, name, values):
    make = completion if model is CompletionRequest else chat
    for value in values:
        assert getattr(make(**{name: value}), name) == value
    error = error_of(make, **{name: "something else"})
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(f"{name}: ")
    assert "leave it out or send null" in error.message
    assert "something else" not in error.message


def test_true_is_not_one():
    assert error_of(completion, best_of=True).param == "best_of"
    assert error_of(completion, skip_special_tokens=1).param == "skip_special_tokens"
    assert completion(length_penalty=1).length_penalty == 1


def test_unknown_fields_are_named_with_the_nearest_known_one():
    error = error_of(completion, temprature=1, zzz=2)
    assert error.code == "unknown_parameter"
    assert "unknown field 'temprature'; did you mean 'temperature'?" in error.message
    assert "unknown field 'zzz'" in error.message


def test_a_field_of_the_other_endpoint_is_not_proposed_for_itself():
    message = error_of(chat, echo=True).message
    assert message == "unknown field 'echo': it belongs to another endpoint or another object"
    assert "'messages'" in error_of(completion, message="a").message


def test_unknown_fields_inside_are_refused():
    error = error_of(chat, messages=[{"role": "user", "content": "x", "weight": 1}])
    assert "unknown field 'messages.0.weight'" in error.message
    assert (
        "unknown field 'stream_options.more'"
        in error_of(chat, stream=True, stream_options={"more": 1}).message
    )


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
        None,
        3,
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [True],
        [-1],
        [2**31],
        ["a"] * (MAX_CHOICES + 1),
        "\ud800",
        [[1], "a"],
    ],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=repr,
)
def test_wrong_values_are_refused_by_name(name, value):
    error = error_of(
        completion, **({name: value, "stream": True} if name == "stream_options" else {name: value})
    )
    assert error.status == 400
    assert error.param == name
    json.dumps(error.body()).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages.0.content.0.type: ",
        ),
        ({"top_logprobs": 2}, "top_logprobs: only with logprobs=true"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens: differs from max_completion_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stream_options": {}}, "stream_options: only with stream=true"),
    ],
    ids=str,
)
def test_conversations_that_cannot_be(fields, message):
    assert message in error_of(chat, **fields).message


def test_prompts_become_a_list():
    assert completion(prompt="a").prompt == ("a",)
    assert completion(prompt=["a", "b"]).prompt == ("a", "b")
    assert completion(prompt=[1, 2]).prompt == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompt == ((1,), (2, 3))


def test_stops_become_a_list():
    assert completion(stop=None).stop == completion(stop=[]).stop == completion().stop == ()
    assert completion(stop="x").stop == ("x",)


def test_parts_of_a_message_are_one_text():
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": ", you"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "Hello, you"


def test_many_errors_are_cut_short():
    error = error_of(completion, **{f"field{number}": 1 for number in range(9)})
    assert error.message.endswith("; and more")


def test_long_names_are_clipped():
    assert len(error_of(completion, **{"x" * 100_000: 1}).message) < 200
