"""Calls of functions: read the same however an answer is cut, forced by grammars, and run by the client that agents use."""

import json
from copy import deepcopy
from dataclasses import replace

import openai
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import monge
from monge.core.errors import GrammarError
from monge.requests.chat_format import TemplateFormat
from monge.requests.grammar import GrammarCompiler
from monge.serve.api.call_reader import CallReader
from monge.serve.api.conversations import Function
from monge.serve.api.tools import CallFormat, ToolUse, call_format
from tests.serve.served import writing_app

HERMES = CallFormat()
MISTRAL = CallFormat(begin="[TOOL_CALLS]", before=" [", after="]", end="")
BARE = CallFormat(begin="", before="", key="parameters", after="", end="")
FORMS = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": BARE,
    "hidden": replace(MISTRAL, hidden=frozenset({"[TOOL_CALLS]"})),
}
FUNCTIONS = [Function(name="f"), Function(name="get_weather")]


def read(form, pieces, finish="stop", **options):
    """The message that a client puts together from what the pieces give."""
    reader = CallReader(ToolUse(form=form, functions=FUNCTIONS, **options), "answer")
    content, calls = "", []
    for place, piece in enumerate(pieces):
        text, found = reader.read(piece, finish if place == len(pieces) - 1 else None)
        content += text
        for call in found:
            if call["index"] == len(calls):
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    assert len(calls) == reader.num_calls
    return content, calls


def call(form, name="f", arguments="{}"):
    return f'{{"name": "{name}", "{form.key}": {arguments}}}'


ARGUMENTS = '{"a": "}</tool_call>[{\\"é\\u00e9", "b": [1.50, {}]}'
PARTS = [
    *('{"name": "f", "arguments": ' + ARGUMENTS + "}", '{"name": "f", "parameters": {"a": 1}}'),
    *('{"arguments": {"a": 1}, "name": "f"}', '{"name": "other", "arguments": {}}'),
    *('{"name": "f", "arguments": {"a": }}', '{"name": "f", "arguments": "a"}'),
    *('{"name": "f"}', '{"name": "f", "arg', "<tool_call>", "\n</tool_call>", "[TOOL_CALLS]"),
    *(" [", "]", ", ", ";", "\n", " ", "Well, ", "<t"),
]


def check_cuts(form, text, places, finish="stop", **options):
    """Any cut gives the same message, and so do pieces of one character."""
    whole = read(form, [text], finish, **options)
    for each in (sorted(one for one in places if one < len(text)), range(1, len(text))):
        ends = [0, *each, len(text)]
        pieces = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        assert read(form, pieces, finish, **options) == whole
    assert whole[1] or whole[0] == text, "nothing is lost"
    return whole


@settings(max_examples=300)
@given(
    form=st.sampled_from(list(FORMS.values())),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    cuts=st.sets(st.integers(0, 400), max_size=40),
    finish=st.sampled_from(["stop", "length"]),
    is_required=st.booleans(),
)
def test_every_cut_of_an_answer_gives_the_same_message(form, parts, cuts, finish, is_required):
    check_cuts(form, "".join(parts), cuts, finish, is_required=is_required)


ONE = [["f", '{"a": 1}']]
TWO = [["f", '{"a":  1}'], ["get_weather", "{}"]]
READ = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", ONE),
    ("hermes", 'So:\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}', "So:", ONE),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call> Bye', " Bye", ONE),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a":  1}}</tool_call>\n'
        '<tool_call>{"name": "get_weather"}</tool_call>\n',
        "",
        TWO,
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "\n</tool", ONE),
    ("hermes", "<tool_call>{</tool_call> " + call(HERMES), None, []),
    ("hermes", "<tool_call>" + call(HERMES, "g") + "</tool_call>", None, []),
    ("hermes", call(HERMES), None, []),
    ("mistral", 'Ok [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "Ok", ONE),
    ("hidden", ' [{"name": "f", "arguments": {"a":  1}}, {"name": "get_weather"}]', "", TWO),
    ("llama", '{"name": "f", "parameters": {"a":  1}}; {"name": "get_weather"}', "", TWO),
    ("llama", "Well: " + call(BARE), None, []),
    ("llama", '{"name": "Ada", "parameters": {}}', None, []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_that_models_write(form, text, content, calls):
    found, made = check_cuts(FORMS[form], text, ())
    assert [one[1:] for one in made] == calls
    assert found == (text if content is None else content)
    assert len({one[0] for one in made}) == len(made)
    assert all(len(one[0]) == 9 and one[0].isalnum() for one in made)


def test_a_call_that_is_cut_has_the_arguments_so_far():
    text = 'Hm <tool_call>\n{"name": "f", "arguments": {"a": "x'
    assert [one[1:] for one in read(HERMES, [text], "length")[1]] == [["f", '{"a": "x']]
    assert read(HERMES, [text], "stop") == (text, []), "the model ended it: no call"
    assert len(read(HERMES, [text], "stop", is_required=True)[1]) == 1, "a stop string did"
    assert read(HERMES, [text[:-8] + "]"], "length") == (text[:-8] + "]", [])


TURNS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}CALL{% endfor %}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}" + TURNS
WRITTEN = {
    "hermes": "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>",
    "mistral": "[TOOL_CALLS] [{{ c.function | tojson }}]",
    "llama": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "xml": "<tool_call><function={{ c.function.name }}></function></tool_call>",
}


@pytest.fixture(scope="module")
def decoder():
    return monge.load()


def test_a_text_beside_calls_that_a_template_leaves_out_is_written_with_them(decoder):
    template = WITH_TOOLS.replace("CALL", WRITTEN["hermes"])
    template = template.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    chat = TemplateFormat(decoder.tokenizer, template)
    found = call_format(chat, decoder.eos_ids)
    assert (found.has_calls, found.has_both) == (True, False)
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    for said in ("", "Let me see."):
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": said, "tool_calls": [called]},
            {"role": "tool", "content": "Rain", "tool_call_id": "1"},
        ]
        turns = found.turns(turns, [])
        assert ("tool_calls" in turns[1]) == (not said)
        text = chat.written(turns)
        assert text.index(said) < text.index('"f"') < text.index("Rain")


@pytest.mark.parametrize("name", [*WRITTEN, "drops calls", "drops tools"])
def test_a_template_shows_how_calls_are_written(decoder, name):
    template = WITH_TOOLS.replace("CALL", WRITTEN.get(name, "")) if name != "drops tools" else TURNS
    if name == "drops calls":
        template = '<tool_call>{"arguments": ...}</tool_call>' + template
    chat = TemplateFormat(decoder.tokenizer, template)
    found = call_format(chat, decoder.eos_ids)
    own = FORMS.get(name, CallFormat())
    can = {"has_tools": name in {*FORMS, "drops calls"}}
    can |= {"has_calls": name in FORMS, "has_both": name in FORMS}
    assert replace(found, added={}, hidden=frozenset()) == replace(own, **can)
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "Rain", "tool_call_id": "1"},
        {"role": "tool", "content": "Wind", "tool_call_id": "2"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    turns = found.turns(turns, [tool])
    text = chat.written(turns, tools=[tool] if found.has_tools else [])
    assert text.count('"type": "function", "function": {"name": "f"') == 1, "told once"
    assert text.index('"f"') < text.index("Hi") < text.index('"a": "é"') < text.index("Rain")
    after = text[text.index("Hi") :].removeprefix("Hi<|end|><|assistant|>")
    assert read(found, [after.partition("<|end|>")[0]])[1][0][1:] == ["f", '{"a": "é"}']


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
OTHER = {"type": "function", "function": {"name": "f", "description": "// start: {}" + 1100 * "a "}}
STRICT = {"type": "function", "function": TOOL["function"] | {"strict": True}}


def rebuilt(chunks):
    """The message, end and usage that the deltas of a stream add up to."""
    content, calls, ends, usage = "", [], [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
            for one in choice.delta.tool_calls or ():
                if one.index == len(calls):
                    calls.append((one.function.name, []))
                calls[one.index][1].append(one.function.arguments)
    return content, [(name, "".join(parts)) for name, parts in calls], ends, usage


ASKED = {"model": "toy", "messages": [{"role": "user", "content": "Will it rain in Rome?"}]}


def check(calls, names=("get_weather",)):
    for name, text in calls:
        assert name in names
        values = json.loads(text)
        assert isinstance(values, dict)
        if name == "get_weather":
            assert {"city"} <= set(values) <= {"city", "days"}
            assert values["city"] in WEATHER["properties"]["city"]["enum"]
            assert values.get("days", 0) <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_well_formed_and_stream_as_they_are(official, choice, seed):
    tools = [TOOL, OTHER | {"function": OTHER["function"] | {"parameters": WEATHER}}]
    names = ["f"] if isinstance(choice, dict) else ["f", "get_weather"]
    fields = ASKED | {"tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 300}
    fields |= {"parallel_tool_calls": False}
    answer = official.chat.completions.create(**fields, logprobs=True)
    (choice,) = answer.choices
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
    check(calls, names)
    assert choice.message.content is None
    assert len(calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = official.chat.completions.create(**fields, **streams)
    *told, usage = rebuilt(chunks)
    assert told == ["", calls, ["tool_calls"]]
    assert usage.completion_tokens == answer.usage.completion_tokens
    with official.chat.completions.stream(**fields) as events:
        final = events.get_final_completion().choices[0].message
    assert [(one.function.name, one.function.arguments) for one in final.tool_calls] == calls


def test_an_agent_runs_to_its_end(official):
    def get_weather(city, days=1):
        return f"Rain in {city} for {days} days."

    turns = list(ASKED["messages"])
    for choice in ("required", "none"):
        fields = {"tools": [STRICT], "tool_choice": choice, "parallel_tool_calls": False}
        fields |= {"max_tokens": 60, "seed": 1}
        answer = official.chat.completions.create(model="toy", messages=turns, **fields)
        message = answer.choices[0].message
        turns.append(message.model_dump())
        for one in message.tool_calls or ():
            result = get_weather(**json.loads(one.function.arguments))
            turns.append({"role": "tool", "content": result, "tool_call_id": one.id})
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[-1]["content"]
    assert turns[-1]["tool_calls"] is None


def test_choices_ends_and_stops_of_calls(official):
    fields = ASKED | {"tools": [TOOL], "tool_choice": "required", "seed": 2}
    many = official.chat.completions.create(**fields, n=3, max_tokens=100)
    assert len({one.message.tool_calls[0].id for one in many.choices}) == 3
    for choice in many.choices:
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
        check(calls if choice.finish_reason == "tool_calls" else calls[:-1])
    for cut, end in (({"max_tokens": 33}, "length"), ({"stop": ['"city"']}, "tool_calls")):
        for stream in (False, True):
            answer = official.chat.completions.create(**fields, **cut, stream=stream)
            if stream:
                content, calls, (finish,), _ = rebuilt(answer)
            else:
                (choice,), content = answer.choices, ""
                calls, finish = choice.message.tool_calls, choice.finish_reason
                calls = [(one.function.name, one.function.arguments) for one in calls]
            assert (content, finish, calls[0][0]) == ("", end, "get_weather")
            assert '{"city": "Rome"}'.startswith(calls[0][1][:9])
            with pytest.raises(ValueError, match="line 1"):
                json.loads(calls[0][1])


@pytest.mark.parametrize("is_called", [True, False])
def test_calls_that_a_model_makes_by_itself(is_called):
    text = 'So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    text = text.replace("}}", "}}" if is_called else "}")
    with TestClient(writing_app(text)) as web:
        official = openai.OpenAI(api_key="none", base_url="http://testserver/v1", http_client=web)
        answer = official.chat.completions.create(**ASKED, tools=[OTHER])
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        chunks = official.chat.completions.create(**ASKED, tools=[OTHER], stream=True)
        content, calls, ends, _ = rebuilt(chunks)
    assert (content, ends) == (message.content, [finish])
    if is_called:
        assert (content, calls, finish) == ("So:", [("f", '{"a": 1}')], "tool_calls")
        assert message.tool_calls[0].function.arguments == '{"a": 1}'
    else:
        assert (content, calls, finish) == (text, [], "stop")


MARKS = [AddedToken(one, special=False) for one in ("<tool_call>", "</tool_call>", "<think>")]
MARKS += [AddedToken("[TOOL_CALLS]", special=True)]


@pytest.mark.parametrize("name", [*FORMS, "added"])
@pytest.mark.parametrize("use", ["required", "strict", "single", "answer"])
def test_grammars_let_calls_through_and_nothing_else(decoder, name, use):
    tokenizer, form = deepcopy(decoder.tokenizer), FORMS.get(name, HERMES)
    if name in {"added", "hidden"}:
        tokenizer.add_tokens(MARKS)
        known = tokenizer.added_tokens_decoder.items()
        added = {str(one): number for number, one in known if number not in decoder.eos_ids}
        form = replace(form, added=added)
    functions = [Function(**STRICT["function"]), Function(name="f", parameters={})]
    options = {
        "required": {"is_required": True},
        "single": {"is_single": True},
        "answer": {"answer": monge.Grammar.json_schema({"type": "integer"})},
    }.get(use, {})
    grammar = ToolUse(form=form, functions=functions, **options).grammar
    start = GrammarCompiler(tokenizer, len(tokenizer), decoder.eos_ids).compile(grammar)

    def passes(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        try:
            start.after_all([*ids, min(decoder.eos_ids)])
        except GrammarError:
            return False
        return True

    def calls(*each):
        texts = [call(form, *one) for one in each]
        inner = [", ".join(texts)] if "[" in form.before else texts
        return "\n".join(f"{form.begin}{form.before}{one}{form.after}{form.end}" for one in inner)

    rome, other = ("get_weather", '{"city": "Rome"}'), ("f", '{"x": [1, null]}')
    assert passes(calls(rome))
    assert passes(calls(other))
    assert not passes(calls(("get_weather", '{"city": "Paris"}')))
    assert not passes(calls(("get_weather", '{"city": "Rome", "more": 1}')))
    assert not passes(calls(("g", "{}")))
    assert passes(calls(rome, other)) is (bool(form.begin) and use != "single")
    assert passes("Hello <there>!\n") is (use in {"strict", "single"})
    assert passes("7") is (use != "required")
    if form.begin and name != "hidden":
        assert passes("So: " + calls(rome)) is (use in {"strict", "single"})
        assert not passes(f"{form.begin}7")
    if name == "added":
        assert passes("<think>So</think>\n" + calls(rome)) is (use in {"strict", "single"})
        assert passes(calls(rome) + "\nSo") is (use == "strict")


TOOLS = {"tools": [TOOL]}


def test_an_answer_has_its_form_or_is_a_call(official):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    fields = {"tools": [STRICT], "parallel_tool_calls": False, "response_format": form}
    answers = official.chat.completions.create(**ASKED, **fields, n=8, seed=1).choices
    for one in answers:
        assert (one.message.content in {"true", "false"}) is (one.finish_reason == "stop")
        assert bool(one.message.tool_calls) is (one.finish_reason == "tool_calls")
    assert len({one.finish_reason for one in answers}) == 2


def test_tokens_of_functions_are_counted(web):
    asked = {"messages": ASKED["messages"]}
    answers = [web.post("/tokenize", json=asked | more).json() for more in ({}, TOOLS)]
    plain, told = (answer["count"] for answer in answers)
    assert told > plain + 20
    body = ASKED | TOOLS | {"max_tokens": 1}
    for choice, count in (("auto", told), ("none", plain)):
        answer = web.post("/v1/chat/completions", json=body | {"tool_choice": choice}).json()
        assert answer["usage"]["prompt_tokens"] == count
