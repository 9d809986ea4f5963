"""Conversations become prompts as the format says, and what a template refuses is an error."""

import re

import pytest
from transformers import AutoTokenizer

from monge.api import built_in, make_components
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel
from monge.requests.chat_format import (
    InstructionFormat,
    NoFormat,
    TemplateFormat,
    chat_format,
)


def said(role, content="", **fields):
    return {"role": role, "content": content, **fields}


TURNS = [said("system", "Be brief."), said("user", "Name a colour.")]
TURNS += [said("assistant", "Red."), said("user", "Another.")]
TEMPLATE = """{%- if messages[0].role == "assistant" %}{{ raise_exception("no answers") }}{% endif %}
{%- for m in messages %}<|end|>{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(built_in("target"))


def test_the_instruction_format_writes_a_conversation(tokenizer):
    text = tokenizer.decode(InstructionFormat(tokenizer).encode(TURNS))
    turns = "Instruction: Name a colour.\nResponse: Red.\n\nInstruction: Another.\nResponse:"
    assert text == f"Be brief.\n\n{turns}"


def test_a_chat_template_writes_a_conversation(tokenizer):
    ids = TemplateFormat(tokenizer, TEMPLATE).encode(TURNS[1:2])
    assert ids[0] == 0, "the template's own special token"
    assert tokenizer.decode(ids[1:]) == "user: Name a colour.\nassistant:"


def test_the_opening_ends_where_the_user_starts(tokenizer):
    form = TemplateFormat(tokenizer, TEMPLATE)
    assert form.opening() == form.encode(TURNS[1:2])[: len(form.opening())]
    assert tokenizer.decode(form.opening(TURNS[:1])) == "<|end|>system: Be brief.\n<|end|>user:"


def test_a_template_without_the_users_words_has_no_opening(tokenizer):
    with pytest.raises(OptionError, match=r"messages\[0\]: .*leaves out text .* of role 'user'"):
        TemplateFormat(tokenizer, "{{ messages | length }} turns").opening()
    with pytest.raises(OptionError, match="does not show where a user's turn starts"):
        TemplateFormat(tokenizer, "{{ messages[0].content | urlencode }}").opening()


PARTS = """{% for m in messages %}{{ m.role }}:{% for part in m.content if part.type == "text" %}
{{ " " + part.text + "\\n" }}{% endfor %}{% endfor %}assistant:"""


def test_a_template_that_reads_lists_of_parts_gets_them(tokenizer):
    form = TemplateFormat(tokenizer, PARTS)
    assert tokenizer.decode(form.encode(TURNS[1:2])) == "user: Name a colour.\nassistant:"
    assert tokenizer.decode(form.opening(TURNS[:1])) == "system: Be brief.\nuser:"


def test_a_template_may_rewrite_a_text(tokenizer):
    form = TemplateFormat(tokenizer, "{{ 'user: ' + messages[0].content.upper() }}")
    assert tokenizer.decode(form.encode(TURNS[1:2])) == "user: NAME A COLOUR."


def test_the_chat_format_is_chosen_by_option_and_model(tokenizer, tmp_path):
    assert isinstance(chat_format(tokenizer, None, is_built_in=True), InstructionFormat)
    assert isinstance(chat_format(tokenizer, None, is_built_in=False), NoFormat)
    assert isinstance(chat_format(tokenizer, "instruction", is_built_in=False), InstructionFormat)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert isinstance(
        chat_format(tokenizer, str(tmp_path / "chat.jinja"), is_built_in=True), TemplateFormat
    )
    with pytest.raises(OptionError, match="neither 'instruction' nor a readable file"):
        chat_format(tokenizer, str(tmp_path / "missing"), is_built_in=True)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(OptionError, match="does not work: TemplateSyntaxError"):
        chat_format(tokenizer, str(tmp_path / "broken.jinja"), is_built_in=True)


@pytest.mark.parametrize(
    ("template", "turns", "complaint"),
    [
        (TEMPLATE, [said("assistant", "x")], "refuses this conversation: no answers"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", TURNS, "does not work: SecurityError"),
        (None, TURNS, "no chat template; complete a plain prompt"),
        (TEMPLATE, "Hello", "must be a list"),
        (TEMPLATE, [], "must be a list"),
        (TEMPLATE, [{"role": "user"}], r"messages\[0\] must have a 'role' and a 'content'"),
        (TEMPLATE, [TURNS[0], said("robot", "a")], r"messages\[1\]: the role .*; got 'robot'"),
        (TEMPLATE, [said("user", ["a"])], "the content must be text; got list"),
        (
            TEMPLATE,
            [said("user", [{"type": "image"}])],
            r"messages\[0\]: part 0 .* 'image', and on",
        ),
        (TEMPLATE, [said("function", "a")], r"messages\[0\]: the role must be one of"),
    ],
)
def test_conversations_that_a_format_cannot_write_are_refused(
    tokenizer, template, turns, complaint
):
    form = NoFormat() if template is None else TemplateFormat(tokenizer, template)
    with pytest.raises(OptionError, match=complaint):
        form.encode(turns)


CLOSED = "{% for m in messages %}{{ m.role }}: {{ m.content }} <|end|>\n{% endfor %}assistant:"
ANSWERED = "{% for m in messages %}{{ m.content | trim }}<|end|>\n{% if not loop.last %}\n{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CLOSED.replace("assistant:", ""), {0}),
        (ANSWERED, {0}),
        (TEMPLATE, set()),
        (PARTS, set()),
        ("{{ messages | length }} turns", set()),
        ("{{ raise_exception('no') }}", set()),
        ("{{ messages[7].content.x() }}", set()),
        ("{% for m in messages %}{{ m.content }}\nend{% endfor %}", set()),
    ],
)
def test_the_token_that_closes_an_answer_ends_a_text(tokenizer, template, ends):
    form = TemplateFormat(tokenizer, template)
    assert form.end_ids() == ends
    target = TabularModel(RandomTable(len(tokenizer), 1), len(tokenizer))
    decoder = Decoder(make_components(target, drafter="none"), tokenizer=tokenizer, chat=form)
    assert decoder.eos_ids == ends
    (request,) = decoder.requests([[1]], ignore_eos=True)
    assert not request.eos_ids


@pytest.mark.parametrize("template", [CLOSED, None])
def test_half_a_pair_of_surrogates_is_refused_by_its_message(tokenizer, template):
    form = InstructionFormat(tokenizer) if template is None else TemplateFormat(tokenizer, template)
    broken = [*TURNS[:1], {"role": "user", "content": "a\ud83d"}]
    with pytest.raises(OptionError, match=r"messages\[1\]: character 1 is .*half of a pair"):
        form.encode(broken)
    with pytest.raises(OptionError, match="chat template: character 0 is .*half of a pair"):
        TemplateFormat(tokenizer, "\ud83d{{ messages[0].content }}").encode(TURNS[1:2])


SETTINGS = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %} / {% endif %}
{%- endfor %}{% if mood %} ({{ mood + "" }}){% endif %}{% if add_generation_prompt %} > {% endif %}"""


def test_settings_of_a_template_and_an_answer_that_goes_on(tokenizer):
    form = TemplateFormat(tokenizer, SETTINGS)
    merry = tokenizer.decode(form.encode(TURNS[1:2], settings={"mood": "merry"}))
    assert merry.endswith("colour. (merry) > ")
    for settings in ({}, {"mood": "merry"}):
        ids = form.encode(TURNS[1:3], is_continued=True, settings=settings)
        assert tokenizer.decode(ids) == "user: Name a colour. / assistant: Red."
    for name in ("chat_template", "tokenize", "add_generation_prompt", "messages", "conversation"):
        with pytest.raises(OptionError, match=f"chat_template_kwargs: '{name}' is not"):
            form.encode(TURNS[1:2], settings={name: "x"})
    for settings in ({"mood": 3}, {"self": 3}):
        with pytest.raises(OptionError, match="does not work: TypeError"):
            form.encode(TURNS[1:2], settings=settings)
    with pytest.raises(OptionError, match="must be the assistant's text"):
        form.encode(TURNS, is_continued=True)


USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ALL, ALL_BUT_SYSTEM = "in messages %}", "in messages if m.role != 'system' %}"
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}


def chat(turns):
    """Messages of one word each, as `role word|role word`."""
    return [said(ROLES[one[0]], one[2:]) for one in turns.split("|")]


WITHOUT_DEVELOPERS = """{% for m in messages %}{% if m.role in ("user", "assistant", "system") %}
{{- m.role }}: {{ m.content | trim }}\n{% endif %}{% endfor %}"""
SYSTEM_FIRST = """{% if messages[0].role == "system" %}<<{{ messages[0].content }}>>\n{% endif %}
{%- for m in messages if m.role in ("user", "assistant") %}{{ m.role }}: {{ m.content }}\n{% endfor %}"""
IN_TURNS = """{% if messages[0].role == "system" %}{{ raise_exception("no system") }}{% endif %}
{%- for m in messages if m.role != "tool" %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("take turns") }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"""
OWN_IDS = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or () %}
{%- if c.id | length != 9 %}{{ raise_exception("nine letters") }}{% endif %}({{ c.function.name }} {{ c.id }})
{%- endfor %}{% if m.role == "tool" %}{% if m.tool_call_id | length != 9 %}
{{- raise_exception("nine letters") }}{% endif %}={{ m.tool_call_id }}{% endif %}\n{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (WITHOUT_DEVELOPERS, [said("developer", " A "), said("user", "b")], "system: A\nuser: b\n"),
        (CLOSED, [said("developer", "a")], "system: a <|end|>\nassistant:"),
        ("{# developer #}" + CLOSED, chat("d a"), "developer: a <|end|>\nassistant:"),
        (SYSTEM_FIRST, chat("s a|d b|u c"), "<<a\n\nb>>\nuser: c\n"),
        (SYSTEM_FIRST, chat("s a|u b|a c|s d"), "<<a>>\nuser: b\nassistant: c\nuser: d\n"),
        (SYSTEM_FIRST, [said("user", "hi there"), said("system", "hi")], "user: hi there\n\nhi\n"),
        (IN_TURNS, chat("s a|s |u b|a c|d d|u e"), "user: a\n\nb\nassistant: c\nuser: d\n\ne\n"),
        (IN_TURNS, chat("u a|s b|u c"), "user: a\n\nb\n\nc\n"),
        (IN_TURNS, [said("system", "a")], "user: a\n"),
        (PARTS.replace(ALL, ALL_BUT_SYSTEM), chat("s a|u b"), "user: a\n\nb\nassistant:"),
        ("{{ messages[0].content | urlencode }}", [said("user", "a b")], "a%20b"),
        ("{{ messages[0].content.split('</think>')[-1] }}", [said("assistant", "a</think>b")], "b"),
        (SYSTEM_FIRST, [said("user", "a"), said("assistant", " ")], "user: a\nassistant:  \n"),
    ],
)
def test_every_message_is_in_the_text(tokenizer, template, turns, text):
    assert TemplateFormat(tokenizer, template).written(turns) == text


@pytest.mark.parametrize(
    ("template", "turns", "place", "role"),
    [
        (SYSTEM_FIRST, [said("user", "hi there"), said("tool", "hi")], 1, "tool"),
        (SYSTEM_FIRST, [*chat("u a"), said("assistant", tool_calls=[{}])], 1, "assistant"),
        (IN_TURNS, [said("user", "a"), said("system", "b"), said("tool", "c")], 2, "tool"),
        ("{{ messages[0].content[:2] }}", [said("user", "abcd")], 0, "user"),
        ("{{ messages[-1].content }}", [said("user", "a"), said("user", "ab")], 0, "user"),
        (USERS, [said("user", "a\ufffc1\ufffc"), said("assistant", "a")], 1, "assistant"),
    ],
)
def test_a_message_without_a_place_is_refused(tokenizer, template, turns, place, role):
    with pytest.raises(OptionError, match=rf"messages\[{place}\]: .*of role '{role}'"):
        TemplateFormat(tokenizer, template).written(turns)


def test_calls_have_the_ids_that_a_template_takes(tokenizer):
    def calls(*ids):
        made = [{"id": one, "function": {"name": "f", "arguments": {}}} for one in ids]
        return [
            said("assistant", tool_calls=made),
            *(said("tool", tool_call_id=one) for one in ids),
        ]

    form = TemplateFormat(tokenizer, OWN_IDS)
    text = form.written(calls("call_1", "abcdefghi", "call_2"))
    told = re.findall(r"\(f (\w{9})\)", text)
    assert told == re.findall(r"=(\w{9})", text)
    assert told[1] == "abcdefghi"
    assert len(set(told)) == 3
    assert text == form.written(calls("call_1", "abcdefghi", "call_2")), "a prefix stays one"
    as_given = TemplateFormat(tokenizer, OWN_IDS.replace("!= 9", "== 0"))
    assert "(f call_1)" in as_given.written(calls("call_1"))


def test_few_renderings_of_a_long_chat(tokenizer, monkeypatch):
    num, render = [], TemplateFormat._rendered
    count = lambda self, *turns, **options: num.append(1) or render(self, *turns, **options)  # noqa: E731
    monkeypatch.setattr(TemplateFormat, "_rendered", count)
    TemplateFormat(tokenizer, CLOSED).encode([*TURNS, *TURNS[2:] * 50])
    assert len(num) == 2
