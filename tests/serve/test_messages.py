"""Every message is in the prompt at every door, or is refused with its number and role."""

import pytest
from fastapi.testclient import TestClient
from tokenizers.processors import TemplateProcessing

import monge
from monge.options import ServeOptions
from monge.requests.chat_format import TemplateFormat
from monge.serve.http.app import create_app

IN_TURNS = """{{ bos_token }}{% if messages[0].role == "system" %}{{ raise_exception("no system") }}
{%- endif %}{% for m in messages if m.role != "tool" %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("take turns") }}{% endif %}<{{ m.role }}> {{ m.content | trim }}{% endfor %}"""
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client():
    decoder = monge.load()
    tokenizer = decoder.tokenizer
    tokenizer.bos_token = "<|end|>"
    before = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.backend_tokenizer.post_processor = before
    decoder.chat_format = TemplateFormat(tokenizer, IN_TURNS)
    with TestClient(create_app(decoder, ServeOptions(strict=True))) as made:
        made.tokenizer = tokenizer
        yield made


def prompts(client, messages, **fields):
    """The text of the prompt at each door, or its refusal."""
    asked = {"messages": messages} | fields
    chat = asked | {"max_tokens": 1, "return_token_ids": True}
    ways = ("/tokenize", asked, "tokens"), ("/v1/chat/completions", chat, "prompt_token_ids")
    for path, sent, name in ways:
        answer = client.post(path, json=sent)
        body = answer.json()
        if answer.status_code != 200:
            assert answer.status_code == 400
            yield body["error"]["message"]
        else:
            yield client.tokenizer.decode(body[name], skip_special_tokens=False)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_the_users_where_a_template_has_no_role_for_them(client, role):
    told = {"role": role, "content": "Be brief. "}
    for text in prompts(client, [told, USER]):
        assert text == "<|end|><user> Be brief. \n\nhi"
    items = {"max_output_tokens": 1, "temperature": 0}
    asked = [{"input": [told, USER]}, {"input": "hi", "instructions": told["content"]}]
    usages = [client.post("/v1/responses", json=items | one).json()["usage"] for one in asked]
    ids = client.tokenizer("<|end|><user> Be brief. \n\nhi", add_special_tokens=False).input_ids
    assert [usage["input_tokens"] for usage in usages] == [len(ids)] * 2


def test_functions_are_told_to_the_user(client):
    for text in prompts(client, [USER], tools=[{"type": "function", "function": TOOL}]):
        assert text.startswith("<|end|><user> You may call functions.")
        assert text.index('"f"') < text.index("\n\nhi")


def test_a_message_that_no_template_writes_is_refused_with_its_number(client):
    client_format = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    decoder = monge.load()
    decoder.chat_format = TemplateFormat(decoder.tokenizer, client_format)
    with TestClient(create_app(decoder, ServeOptions())) as other:
        other.tokenizer = decoder.tokenizer
        for refusal in prompts(other, [USER, {"role": "assistant", "content": "hi"}]):
            assert refusal.startswith("messages[1]: ")
            assert "role 'assistant'" in refusal


def test_parts_of_a_message_are_lines(client):
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    for text in prompts(client, [{"role": "user", "content": parts}]):
        assert text == "<|end|><user> a\nb"


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ("hi", {}, "<|end|>hi"),
        ("hi", {"add_special_tokens": True}, "<|end|>hi"),
        ("hi", {"add_special_tokens": False}, "hi"),
        ("<|end|>hi", {}, "<|end|>hi"),
        ("<|end|>hi", {"add_special_tokens": False}, "<|end|>hi"),
        ("<|end|><|end|>hi", {"add_special_tokens": False}, "<|end|><|end|>hi"),
    ],
)
def test_special_tokens_around_a_text(client, prompt, fields, text):
    asked = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, "echo": True}
    (choice,) = client.post("/v1/completions", json=asked | fields).json()["choices"]
    ids = client.post("/tokenize", json={"prompt": prompt} | fields).json()["tokens"]
    assert choice["prompt_token_ids"] == ids
    assert client.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert choice["text"].startswith(prompt)
