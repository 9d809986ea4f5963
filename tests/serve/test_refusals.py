"""What a request cannot have is refused, with the name of the field as the client wrote it."""

import json

import pytest
from fastapi.testclient import TestClient

from monge.serve.api.fields import MAX_DRAFT
from tests.serve.served import CONTEXT, toy_app, toy_decoder

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
ASKED = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": TURNS[:1]}, RESPONSES: {"input": "hello"}}
LONG = [{"role": "user", "content": "a" * CONTEXT}]
LENGTH, UNKNOWN = "context_length_exceeded", "unknown_parameter"
OFFERED = "fixed(max_depth=2), fsm(first=2), fixed"
"""Controllers of the server."""
WEATHER = {"type": "function", "name": "get_weather"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}
RESULT = {"type": "function_call_output", "call_id": "1", "output": {}}


def function(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


def told(**fields):
    return {"speculation": fields}


REFUSED = {
    COMPLETIONS: [
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"prompt": ["a"] * 65, "n": 2}, "n", "at most 128 completions"),
        ({"prompt": [99], "echo": True}, "prompt", "must lie in 0..29; got 99"),
        ({"logit_bias": {"99": 1}}, "logit_bias", "must lie in 0..29; got 99"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "token ids must lie in 0..29"),
        ({"min_tokens": 41, "max_tokens": 40}, "min_tokens", "is more than"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": "a" * 500}, "prompt", "prompt of 500 tokens", LENGTH),
        ({"max_tokens": 500}, "max_tokens", "max_tokens=500", LENGTH),
        ({"stream_options": {}}, "stream_options", "only with stream=true"),
        ({"stream": 1, "stream_options": {}}, "stream", "valid boolean"),
        ({"bad_words": [""]}, "bad_words.0", "at least 1"),
        ({"bad_words": [" "]}, "bad_words", "expected a word"),
        ({"bad_words": ["\ud800"]}, "bad_words.0", "unicode"),
        ({"allowed_token_ids": [99]}, "allowed_token_ids", "must lie in 0..29"),
        ({"allowed_token_ids": [0], "min_tokens": 2}, "allowed_token_ids", "leave none"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
        ({"drawn_logprobs": True}, "drawn_logprobs", "only with logprobs"),
        ({"speculation": 0}, "speculation", "valid boolean"),
        ({"speculation": "fast"}, "speculation", "valid boolean"),
        (told(max_depth=-1), "speculation.max_depth", "greater than or equal to 0"),
        (told(max_depth=MAX_DRAFT + 1), "speculation.max_depth", f"equal to {MAX_DRAFT}"),
        (told(max_nodes=2.5), "speculation.max_nodes", "valid integer"),
        (told(max_nodes=True), "speculation.max_nodes", "valid integer"),
        (told(adaptive="yes"), "speculation.adaptive", "valid boolean"),
        (told(max_deep=2), "speculation.max_deep", "did you mean 'max_depth'?", UNKNOWN),
        (told(drafter="../passwd"), "speculation.drafter", "unknown field", UNKNOWN),
        (told(controller="goodput"), "speculation.controller", f"there are: {OFFERED}"),
        (told(controller=""), "speculation.controller", "no such controller here"),
        (told(controller="../passwd"), "speculation.controller", "no such controller"),
        (told(controller=["fixed"]), "speculation.controller", "valid string"),
        (told(adaptive=False, controller="a"), "speculation.controller", "asks for none"),
    ],
    CHAT: [
        ({"messages": LONG}, "messages", "the conversation has", LENGTH),
        ({"max_tokens": CONTEXT}, "max_tokens", "exceeds", LENGTH),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens", "exceeds", LENGTH),
        ({"logit_bias": {"99": 1}}, "logit_bias", "token ids must lie"),
        ({"response_format": {"type": "x"}}, "response_format.type", "should be"),
        ({"drawn_logprobs": True}, "drawn_logprobs", "only with logprobs"),
        ({"continue_final_message": True}, "messages", "assistant's"),
        ({"messages": TURNS, "add_generation_prompt": False}, "add_generation_prompt", "opposite"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "no template that takes any"),
        ({"messages": [TURNS[0] | {"role": "tool"}]}, "messages.0.tool_call_id", "role"),
    ],
    "/tokenize": [
        ({}, "prompt", "send prompt or messages"),
        ({"prompt": "a", "messages": TURNS}, "prompt", "send it or messages"),
        ({"prompt": "a", "tools": [function()]}, "prompt", "send it or messages"),
        ({"prompt": "a", "seed": 1}, "seed", "another endpoint", UNKNOWN),
    ],
    "/detokenize": [
        ({"tokens": []}, "tokens", "non-empty list of token ids"),
        ({"tokens": [30]}, "tokens", "token ids must lie in 0..29"),
        ({"tokens": "a"}, "tokens", "non-empty list of token ids"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": [function()]}, "tools.0.name", "required", UNKNOWN),
        ({"tools": [WEATHER | {"type": "mcp"}]}, "tools.0.type", "'function'"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions have one name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": WEATHER | {"name": "g"}}, "tool_choice", "'g'"),
        ({"background": True}, "background", "answers are not kept"),
        ({"previous_response_id": "1"}, "previous_response_id", "send the conversation"),
        ({"input": None}, "input", ""),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments", "call_id: req"),
        ({"input": [CALL]}, "input.0.arguments", "must be the text of a JSON object"),
        ({"input": [RESULT]}, "input.0.output", ""),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.role", "messages are text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context length of 400", LENGTH),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "json_schema is missing"),
        ({"messages": []}, "messages", "", UNKNOWN),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ],
}
FORCED = {"tools": [function()], "tool_choice": "required"}
# Their functions are forced by grammars, which need the tokenizer of the built-in pair.
REFUSED_CALLS = [
    ({"ignore_eos": True}, "ignore_eos", "where the text ends"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "only json goes with tools"),
    ({"tools": [function(parameters={"not": {}})]}, "tools", "not"),
]


@pytest.fixture(scope="module")
def client():
    app = toy_app(toy_decoder(controller=tuple(OFFERED.split(", "))))
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


def check_refusal(client, path, fields, param, message, code=None):
    content = json.dumps(ASKED.get(path, {}) | fields)
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"], error["code"]) == (param, code), error
    assert message in error["message"]
    assert "passwd" not in error["message"], "an answer repeats no value"


@pytest.mark.parametrize(
    ("path", "row"), [(path, row) for path, rows in REFUSED.items() for row in rows], ids=str
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(client, path, row):
    check_refusal(client, path, *row)


@pytest.mark.parametrize("row", REFUSED_CALLS, ids=str)
def test_forced_calls_that_cannot_be_honoured_are_refused_by_name(web, row):
    fields, *told = row
    check_refusal(web, CHAT, FORCED | fields, *told)
