"""Conversations become prompts as the format says, and what a template refuses is the client's error."""

import pytest
from transformers import AutoTokenizer

from monge.api import built_in
from monge.core.errors import OptionError
from monge.serve.chat import InstructionFormat, NoFormat, TemplateFormat, chat_format
from monge.serve.errors import ApiError
from monge.serve.schemas import Message

TURNS = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Name a colour."),
    Message(role="assistant", content="Red."),
    Message(role="user", content="Another."),
]
TEMPLATE = """{%- if messages[0].role == "developer" %}{{ raise_exception("no developers") }}{% endif %}
{%- for m in messages %}<|end|>{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(built_in("target"))


def test_instructions(tokenizer):
    text = tokenizer.decode(InstructionFormat(tokenizer).encode(TURNS))
    assert text == "Be brief.\n\nInstruction: Name a colour.\nResponse: Red.\n\nInstruction: Another.\nResponse:"


def test_template(tokenizer):
    ids = TemplateFormat(tokenizer, TEMPLATE).encode(TURNS[1:2])
    assert ids[0] == 0, "the template's own special token"
    assert tokenizer.decode(ids[1:]) == "user: Name a colour.\nassistant:"


def test_what_a_template_refuses_is_a_400(tokenizer):
    with pytest.raises(ApiError, match="refuses this conversation: no developers") as caught:
        TemplateFormat(tokenizer, TEMPLATE).encode([Message(role="developer", content="x")])
    assert caught.value.status == 400


def test_no_template_is_a_400(tokenizer):
    with pytest.raises(ApiError, match="no chat template; use /v1/completions"):
        NoFormat().encode(TURNS)


def test_a_template_cannot_reach_out_of_its_sandbox(tokenizer):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(OptionError, match="does not work: SecurityError"):
        TemplateFormat(tokenizer, template)


def test_choice(tokenizer, tmp_path):
    assert isinstance(chat_format(tokenizer, None, is_built_in=True), InstructionFormat)
    assert isinstance(chat_format(tokenizer, None, is_built_in=False), NoFormat)
    assert isinstance(chat_format(tokenizer, "instruction", is_built_in=False), InstructionFormat)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert isinstance(chat_format(tokenizer, str(tmp_path / "chat.jinja"), is_built_in=True), TemplateFormat)
    with pytest.raises(OptionError, match="neither 'instruction' nor a readable file"):
        chat_format(tokenizer, str(tmp_path / "missing"), is_built_in=True)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(OptionError, match="does not work: TemplateSyntaxError"):
        chat_format(tokenizer, str(tmp_path / "broken.jinja"), is_built_in=True)
