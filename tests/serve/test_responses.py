"""`/v1/responses`: the texts of the chat endpoint, whole and as events, with the client that users have."""

import json

SCHEMA = {
    "type": "object",
    "properties": {"coast": {"type": "boolean"}},
    "required": ["coast"],
    "additionalProperties": False,
}
ASKED = {
    "input": "Hello",
    "max_output_tokens": 4,
    "seed": 4,
    "temperature": 1.0,
    "ignore_eos": True,
}


def chat_text(web, messages):
    body = {
        "messages": messages,
        "max_completion_tokens": 4,
        "seed": 4,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    return web.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_is_the_text_of_the_chat(web):
    answer = web.post("/v1/responses", json=ASKED).json()
    (item,) = answer["output"]
    (part,) = item["content"]
    assert part["text"] == chat_text(web, [{"role": "user", "content": "Hello"}])
    assert (answer["object"], answer["status"], item["role"]) == (
        "response",
        "incomplete",
        "assistant",
    )
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 4
    assert answer["store"] is False


def test_instructions_are_a_system_message_and_items_are_turns(web):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": []}],
        },
        {"role": "user", "content": "Go on"},
    ]
    body = ASKED | {"input": turns, "instructions": "Be kind"}
    answer = web.post("/v1/responses", json=body).json()
    plain = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    assert answer["output"][0]["content"][0]["text"] == chat_text(web, plain)
    assert answer["instructions"] == "Be kind"


def test_events_end_in_the_whole_response(official, web):
    whole = web.post("/v1/responses", json=ASKED).json()["output"][0]["content"][0]["text"]
    with official.responses.stream(
        model="toy",
        input="Hello",
        max_output_tokens=4,
        temperature=1.0,
        extra_body={"seed": 4, "ignore_eos": True},
    ) as events:
        seen = list(events)
    kinds = [event.type for event in seen]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == whole
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == whole


def test_a_schema_is_followed(official):
    form = {"type": "json_schema", "name": "town", "schema": SCHEMA, "strict": True}
    answer = official.responses.create(
        model="toy", input="A town", max_output_tokens=60, text={"format": form}
    )
    assert set(json.loads(answer.output_text)) == {"coast"}
    assert answer.status == "completed"
    assert answer.text.format.name == "town"
