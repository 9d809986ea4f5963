"""`/v1/responses`: the texts of the chat endpoint, whole and as events, with the client that users have."""

import json

SCHEMA = {"type": "object", "properties": {"coast": {"type": "boolean"}}}
SCHEMA |= {"required": ["coast"], "additionalProperties": False}
RULES = {"seed": 4, "temperature": 1.0, "ignore_eos": True}
ASKED = {"input": "Hello", "max_output_tokens": 4} | RULES


def chat_text(web, messages):
    body = {"messages": messages, "max_completion_tokens": 4} | RULES
    return web.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_is_the_text_of_the_chat(web):
    answer = web.post("/v1/responses", json=ASKED).json()
    (item,) = answer["output"]
    (part,) = item["content"]
    assert part["text"] == chat_text(web, [{"role": "user", "content": "Hello"}])
    assert (answer["object"], answer["status"]) == ("response", "incomplete")
    assert item["role"] == "assistant"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 4
    assert answer["store"] is False


def test_instructions_are_a_system_message_and_items_are_turns(web):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
        | {"content": [{"type": "output_text", "text": "Yes?", "annotations": []}]},
        {"role": "user", "content": "Go on"},
    ]
    body = ASKED | {"input": turns, "instructions": "Be kind"}
    answer = web.post("/v1/responses", json=body).json()
    roles, said = ("system", "user", "assistant", "user"), ("Be kind", "Hello", "Yes?", "Go on")
    plain = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
    assert answer["output"][0]["content"][0]["text"] == chat_text(web, plain)
    assert answer["instructions"] == "Be kind"


def test_events_end_in_the_whole_response(official, web):
    whole = web.post("/v1/responses", json=ASKED).json()["output"][0]["content"][0]["text"]
    fields = {"input": "Hello", "max_output_tokens": 4, "extra_body": RULES}
    with official.responses.stream(model="toy", **fields) as events:
        seen = list(events)
    kinds = [event.type.removeprefix("response.") for event in seen]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends
    assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == whole
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == whole


def test_a_schema_is_followed(official):
    form = {"type": "json_schema", "name": "town", "schema": SCHEMA, "strict": True}
    fields = {"input": "A town", "max_output_tokens": 60, "text": {"format": form}}
    answer = official.responses.create(model="toy", **fields)
    assert set(json.loads(answer.output_text)) == {"coast"}
    assert answer.status == "completed"
    assert answer.text.format.name == "town"
