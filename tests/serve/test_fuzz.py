"""No request to the endpoints of the OpenAPI description gets a 5xx."""

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.served import toy_app, toy_decoder

# Threads of the server and of its client may draw from the global generator while a body is drawn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning"
)

CONTROLLERS = ("fixed", "fsm")
JSON = {"content-type": "application/json"}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
PLAIN = {"messages": [{"role": "user", "content": "a"}], "tools": None, "tool_choice": None}
"""In place of conversations that fit the schema, and whose turns do not fit each other."""

ODD = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400)
ODD_NUMBERS = st.sampled_from([*ODD, 0.1, 1e308, 5e-324, float("nan"), float("inf")])


@pytest.fixture(scope="module")
def client():
    app = toy_app(toy_decoder(controller=CONTROLLERS), request_timeout_s=20)
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture(scope="module")
def description(client):
    return client.get("/openapi.json").json()


def values(schema, components):  # noqa: PLR0911 (one case a kind of schema)
    """Values that fit a JSON schema, as far as that is easily said."""
    if "$ref" in schema:
        return values(components[schema["$ref"].rpartition("/")[2]], components)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of([values(one, components) for one in schema["anyOf"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return bodies(schema, components)
        case "object":
            extra = schema.get("additionalProperties")
            inner = values(extra, components) if isinstance(extra, dict) else JUNK
            keys = st.text(max_size=3) | st.sampled_from(["0", "5", "29"])
            return st.dictionaries(keys, inner, max_size=3)
        case "array":
            items = values(schema["items"], components)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=4)
        case "integer":
            low, high = schema.get("minimum", -5), schema.get("maximum", 40)
            return st.integers(low, min(high, max(low, 0) + 40)) | st.integers(low, high)
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -5.0))
            is_open = "exclusiveMinimum" in schema
            return st.floats(low, schema.get("maximum", 5.0), exclude_min=is_open)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _ if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case _:
            texts = st.text(min_size=schema.get("minLength", 0), max_size=20)
            return texts | st.sampled_from(CONTROLLERS)


def bodies(schema, components):
    fields = {
        name: values(one, components)
        for name, one in schema["properties"].items()
        if name != "model"
    }
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


def spoilt(body, junk):
    """A body with a few fields replaced."""
    names = st.sampled_from(sorted(body) or ["model"]) | st.text(max_size=6)
    return st.dictionaries(names, junk, max_size=2).map(lambda some: body | some)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_no_body_is_answered_with_a_5xx(client, description, path):
    components, post = description["components"]["schemas"], description["paths"][path]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    seen = set()

    @given(st.data())
    def run(data):
        body = data.draw(values(schema, components))
        if path == "/v1/chat/completions" and data.draw(st.booleans()):
            # Few fields, as many seldom fit each other.
            kept = data.draw(st.sets(st.sampled_from(sorted(body)), max_size=3))
            body = {name: body[name] for name in kept} | PLAIN
        if data.draw(st.booleans()):
            body = data.draw(spoilt(body, JUNK | ODD_NUMBERS))
        sent = json.dumps(body).encode("utf-8", "surrogatepass")
        answer = client.post(path, content=sent, headers=JSON)
        seen.add(answer.status_code)
        assert str(answer.status_code) in post["responses"], answer.text
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run()
    assert seen == {200, 400}, "the fuzz reaches only one side"


@given(st.binary(max_size=200))
def test_random_bytes_are_answered_with_400(client, content):
    answer = client.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400
    assert "error" in answer.json()


METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
PATHS = (
    *("/", "/v1", "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/v1/completions/", "/metrics"),
    *("/v1/models/%7f%00", "//v1/models"),
)


@given(st.sampled_from(METHODS), st.sampled_from(PATHS))
def test_random_methods_and_paths_get_no_5xx(client, method, path):
    assert client.request(method, path).status_code < 500
