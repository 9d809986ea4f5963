"""Streams that clients cut at every line end of Unicode: no letter of a text is one."""

import json

import pytest

TEXT = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk\u4e2d"
BODIES = {
    "/v1/completions": {"prompt": "Say it: "},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x", "user": TEXT},
}
FIELDS = {"temperature": 0, "structured_outputs": {"choice": [TEXT]}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_letters_that_end_lines_are_escaped(web, path, stream):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = FIELDS | {limit: 90, "stream": stream}
    if path == "/v1/completions":
        fields |= {"echo": True, "logprobs": 1, "prompt": TEXT}
    answer = web.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert set(TEXT) & set(answer.text) == set("abcdefghijk\u4e2d") | ({"\n"} if stream else set())
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines] if stream else [json.loads(answer.text)]
    if path == "/v1/responses":
        response = chunks[-1]["response"] if stream else chunks[0]
        assert response["output"][0]["content"][0]["text"] == response["user"] == TEXT
        return
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    name = "delta" if stream else "message"
    texts = [one.get("text") or one.get(name, {}).get("content") or "" for one in choices]
    assert "".join(texts) == (2 * TEXT if "echo" in fields else TEXT)


def test_the_official_client_reads_such_arguments(official):
    schema = {"type": "object", "properties": {"a": {"enum": [TEXT]}}, "required": ["a"]}
    tool = {"type": "function", "name": "f", "parameters": schema}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with official.responses.stream(model="toy", input="x", **fields) as events:
        (call,) = events.get_final_response().output
    assert json.loads(call.arguments) == {"a": TEXT}
