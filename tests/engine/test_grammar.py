"""Structured output of the built-in pair: what a user asks for is what comes."""

import json
import re

import jsonschema
import pytest
from fastapi.testclient import TestClient

import monge
from monge.core.errors import GrammarError, OptionError
from monge.core.grammar import Grammar
from monge.options import SamplingOptions, ServeOptions
from monge.requests import grammar
from monge.requests.grammar import FORCED, GrammarCompiler
from monge.serve.http.app import create_app

SHORT = {"type": "string", "maxLength": 6}
LENIENT = {"not": {}, "x-guidance": {"lenient": True}}
SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "name": SHORT,
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["red", "green", None]},
            "place": {
                "type": "object",
                "properties": {"street": SHORT, "open": {"type": "boolean"}},
                "required": ["street", "open"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "size", "kind", "place"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/short"}]},
        "minItems": 1,
        "maxItems": 3,
        "$defs": {"short": SHORT},
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
}


@pytest.fixture(scope="module")
def decoder():
    return monge.load(controller="fixed")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_text_follows_its_schema(decoder, schema):
    check = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    options = {"n": 12, "max_new_tokens": 300, "grammar": Grammar.json_schema(schema)}
    for temperature in (0, 1.3):
        for result in decoder.generate("JSON:", temperature=temperature, seed=2, **options):
            assert result.finish_reason == "eos"
            check.validate(json.loads(result.text))


def test_a_text_alone_in_a_batch_and_without_speculation_is_the_same(decoder):
    options = {"grammar": Grammar.json_schema(SCHEMAS["nested"]), "max_new_tokens": 300}
    prompts = ["JSON:", "A town as JSON:", "An object:"]
    together = decoder.generate(prompts, **options)
    alone = [decoder.generate(one, **options)[0] for one in prompts]
    plain = monge.load(drafter="none").generate(prompts, **options)
    for results in (alone, plain):
        assert [one.text for one in results] == [one.text for one in together]


def test_forced_tokens_save_forwards(decoder):
    schema = Grammar.json_schema(SCHEMAS["nested"])
    (result,) = decoder.generate("JSON:", grammar=schema, max_new_tokens=300)
    forced = [one for one in result.records if one.drafter == FORCED]
    assert all(one.num_accepted == one.depth for one in forced)
    assert sum(one.num_accepted for one in forced) > len(result.token_ids) / 3


def test_the_text_forms(decoder, tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    (tmp_path / "rules.gbnf").write_text('root ::= "up" | "down"')
    (tmp_path / "rules.lark").write_text('start: "left" | "right"')
    forms = {
        f"{tmp_path}/schema.json": {'"yes"', '"no"'},
        f"{tmp_path}/rules.gbnf": {"up", "down"},
        f"{tmp_path}/rules.lark": {"left", "right"},
        'choice:é 😀|"|x': {"é 😀", '"', "x"},
        "regex:[ab]c": {"ac", "bc"},
    }
    for text, allowed in forms.items():
        found = decoder.generate("Say:", grammar=text, n=8, temperature=1.5, seed=1)
        assert {one.text for one in found} <= allowed, text
        assert SamplingOptions(grammar=text).grammar == Grammar.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema({"not": {}}), r'json_schema: Unimplemented keys: \["not"\]'),
        (lambda: Grammar.json_schema(LENIENT), r'Unimplemented keys: \["not"\]'),
        (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (lambda: Grammar.json_schema("{"), "the JSON schema is not JSON"),
        (lambda: Grammar.json_schema("[]"), "must be an object; got list"),
        (lambda: Grammar.regex("(a"), "unclosed group"),
        (lambda: Grammar.regex(r"(?=a)b"), "look-around"),
        (lambda: Grammar.ebnf("root ::= foo"), "the rule 'foo' is not defined"),
        (lambda: Grammar.ebnf("start: foo"), "foo"),
        (lambda: Grammar.choice([]), "at least one"),
        (lambda: Grammar.regex("\ud800"), "half of a pair"),
        (lambda: "schema.yaml", "grammar 'schema.yaml': expected `json`"),
        (lambda: "missing.json", "cannot be read"),
    ],
)
def test_bad_grammars_are_refused_in_words(decoder, make, message):
    with pytest.raises(OptionError, match=message):
        decoder.generate("a", grammar=make())


@pytest.mark.parametrize("others", [{"ignore_eos": True}, {"min_tokens": 4}])
def test_options_that_move_the_end_do_not_fit(decoder, others):
    with pytest.raises(OptionError, match=f"{next(iter(others))}: a grammar says where"):
        decoder.generate("a", grammar="json", **others)


def test_the_extra_is_named_where_it_is_missing(decoder, without):
    without("llguidance")
    with pytest.raises(OptionError, match=r"a grammar needs llguidance.*\.\[grammar\]"):
        decoder.generate("a", grammar="regex:xyz")


LISTED = {"name": "x", "strict": True, "schema": SCHEMAS["list"]}


@pytest.fixture(scope="module")
def client(decoder):
    with TestClient(create_app(decoder, ServeOptions(served_model_name="toy"))) as one:
        yield one


def test_a_server_reads_the_vocabulary_before_it_serves(monkeypatch):
    decoder = monge.load(controller="fixed")
    app = create_app(decoder, ServeOptions(served_model_name="toy"))
    monkeypatch.setattr("llguidance.hf.from_tokenizer", None)
    with TestClient(app) as client:
        answer = ask(client, structured_outputs={"regex": "[0-9]{3}"}).json()
    assert len(answer["choices"][0]["text"]) == 3


def ask(client, **fields):
    body = {"prompt": "JSON:", "max_tokens": 300, "seed": 1} | fields
    return client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": LISTED}},
            lambda text: jsonschema.validate(json.loads(text), SCHEMAS["list"]) is None,
        ),
        ({"structured_outputs": {"json": SCHEMAS["date"]}}, lambda text: len(text) == 12),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, re.compile("[0-9]{3}").fullmatch),
        ({"structured_outputs": {"choice": ["no", "yes"]}}, lambda text: text in {"no", "yes"}),
        ({"structured_outputs": {"grammar": 'root ::= "up"'}}, lambda text: text == "up"),
        ({"response_format": {"type": "json_object"}}, lambda text: text[:1] == "{"),
        ({"structured_outputs": {"json_object": True}}, lambda text: text[:1] == "{"),
        ({"response_format": {"type": "text"}}, lambda text: True),
    ],
    ids=["list", "date", "regex", "choice", "grammar", "object", "any", "text"],
)
def test_the_server_takes_the_fields_of_openai_and_of_vllm(client, fields, is_right):
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    assert is_right(answer.json()["choices"][0]["text"])


REGEX = {"regex": "a"}


@pytest.mark.parametrize(
    ("outputs", "fields", "param", "message"),
    [
        ({"json": {"not": {}}}, {}, None, "structured_outputs: json_schema: Unimplemented keys"),
        (None, {"response_format": {"type": "json_schema"}}, "response_format", "is missing"),
        ({"regex": "(a"}, {}, None, "unclosed group"),
        ({"regex": "a" * 1100000}, {}, None, "at most 1048576"),
        ({}, {}, None, "send one of"),
        (REGEX | {"choice": ["b"]}, {}, None, "got 2"),
        (REGEX, {"response_format": {"type": "json_object"}}, None, "send one"),
        (REGEX, {"min_tokens": 3}, "min_tokens", "where the text ends"),
        ({"structural_tag": "a"}, {}, "structured_outputs.structural_tag", "unknown"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_the_server_refuses_grammars_by_field(client, outputs, fields, param, message):
    answer = ask(client, structured_outputs=outputs, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param or "structured_outputs"), error
    assert message in error["message"]


@pytest.mark.parametrize("num", [2000, 10_000])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_choice_among_many_texts(decoder, num, temperature):
    texts = [f"item {number}" for number in range(num)]
    (result,) = decoder.generate(
        "Pick:", grammar=Grammar.choice(texts), temperature=temperature, seed=1, max_new_tokens=20
    )
    assert result.text in texts


def test_choices_of_odd_texts(decoder):
    """Nothing in a text is read as a part of a rule, and one may begin another."""
    texts = ["", "a", "ab", "[a-z]", "x|y", "/", "\\", '"', "\n", "(?:", "\u2028", "<[3]>", "é 😀"]
    state = decoder.grammars.compile(Grammar.choice(texts))
    for text in texts:
        end = state.after_all(decoder.encode(text)).after(min(decoder.eos_ids))
        assert end is not None, text
    with pytest.raises(GrammarError, match="cannot go on"):
        state.after_all(decoder.encode("abc"))


def test_an_object_of_many_optional_properties(decoder):
    names = [f"p{number}" for number in range(1000)]
    schema = {"properties": dict.fromkeys(names, {"type": "null"}), "additionalProperties": False}
    grammar = Grammar.json_schema({"type": "object", **schema})
    for result in decoder.generate("JSON:", grammar=grammar, n=4, seed=3, max_new_tokens=60):
        assert result.text.startswith("{")


def test_whitespace_that_is_left_to_the_model_is_bounded(decoder):
    state = decoder.grammars.compile(Grammar.json_object(any_whitespace=True))
    blank = decoder.encode("{ ")[-1:]
    state = state.after_all(decoder.encode("{"))
    count = 0
    while (following := state.after(*blank)) is not None:
        state, count = following, count + 1
        assert count < 1000
    assert count >= 32


def test_the_error_of_the_grammar_library_reaches_the_user(decoder):
    """Counted repetitions compile at once, and grow while the text does."""
    with pytest.raises(GrammarError, match="too many expressions constructed"):
        decoder.generate("a", grammar="regex:((a{1,100}){1,100}){1,100}", max_new_tokens=100)


def test_a_request_whose_masks_take_too_long_ends_alone(decoder, monkeypatch):
    pattern = "[ab]+"
    decoder.grammars.compile(Grammar.regex(pattern))
    monkeypatch.setattr(grammar, "_REQUEST_S", -1.0)  # passed at once
    with pytest.raises(GrammarError, match="of processor time; make it simpler"):
        decoder.generate("a", grammar=f"regex:{pattern}")


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(decoder):
    vocabulary = decoder.tokenizer, decoder.components.target.vocab_size, decoder.eos_ids
    compiler = GrammarCompiler(*vocabulary, max_bytes=1000)
    first, second, third = (Grammar.regex(pattern) for pattern in "abc")
    state = compiler.compile(first, 400)
    compiler.compile(second, 400)
    assert compiler.compile(first) is state, "now the most recently used one"
    compiler.compile(third, 400)
    assert [one in compiler for one in (first, second, third)] == [True, False, True]
    compiler.compile(Grammar.regex("d" * 100))  # is estimated to be larger than all
    assert [one in compiler for one in (first, third)] == [False, False]
