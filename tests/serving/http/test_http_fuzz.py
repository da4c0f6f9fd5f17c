"""Requests drawn from the server's own OpenAPI document, most of them slightly or wholly wrong: never a 5xx."""

import json
from typing import Any

import httpx
import pytest
from http_rig import LiveServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_jax.serving.http.openapi import document

DOCUMENT: dict[str, Any] = document()
POSTS = [path for path, item in DOCUMENT["paths"].items() if "post" in item]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["\0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
# Small, so that what is valid is answered soon; the others reach every border.
INTEGERS = st.integers(-2, 6) | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30])
FLOATS = st.floats(-1, 2) | st.sampled_from([0.0, 1.0, 1e308, -1e308, 5e-324])


def drawn(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of a schema."""
    if "$ref" in schema:
        return drawn(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([drawn(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            return objects(schema)
        case "array":
            return st.lists(drawn(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            return st.text(max_size=12)
        case "integer":
            return INTEGERS
        case "number":
            return FLOATS
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return ANYTHING


def objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with the required and a few of the other properties."""
    properties = schema.get("properties")
    if properties is None:
        return st.dictionaries(st.text(max_size=5), ANYTHING, max_size=3)
    required = schema.get("required", [])
    optional = [name for name in properties if name not in required]
    chosen = st.lists(st.sampled_from(optional), max_size=4, unique=True) if optional else st.just([])
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({name: drawn(properties[name]) for name in [*required, *names]})
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path and a body: right by the document, with one field replaced, or anything."""
    path = draw(st.sampled_from(POSTS))
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body: Any = draw(drawn(schema))
    if draw(st.integers(0, 3)):
        body.pop("model", None)  # any other name than the model's own is a 404
    if draw(st.booleans()):
        body[draw(st.sampled_from([*body, "unknown"]))] = draw(ANYTHING)
    if path.startswith("/v1/"):
        body.setdefault("max_tokens", 3)
    if draw(st.integers(0, 20)) == 0:
        body = draw(ANYTHING)
    content = json.dumps(body).encode()
    if draw(st.integers(0, 20)) == 0:
        cut = draw(st.integers(0, len(content)))
        content = content[:cut] + draw(st.binary(max_size=3)) + content[cut:]
    return path, content


@pytest.fixture(scope="module")
def client(server: LiveServer):
    with httpx.Client(base_url=server.url, timeout=30) as found:
        yield found


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_no_request_drawn_from_the_document_gets_a_5xx(client: httpx.Client, request: tuple[str, bytes]) -> None:
    path, content = request
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()


def test_enough_of_what_is_drawn_is_served(client: httpx.Client) -> None:
    statuses: list[int] = []

    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(request=requests())
    def collect(request: tuple[str, bytes]) -> None:
        path, content = request
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        statuses.append(answer.status_code)

    collect()
    assert statuses.count(200) >= 3
    assert statuses.count(400) >= 3


@pytest.mark.parametrize("path", [path for path, item in DOCUMENT["paths"].items() if "get" in item])
def test_every_documented_page_is_there(server: LiveServer, path: str) -> None:
    answer = server.get(path.replace("{model}", "stub"))
    assert answer.status_code == 200
    assert answer.content


def test_the_document_describes_every_field_and_marks_what_is_refused() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    chat = schemas["ChatCompletionRequest"]["properties"]
    assert "Not supported" in chat["tool_choice"]["description"]
    assert "without effect" in chat["user"]["description"]
    assert chat["temperature"]["anyOf"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    references = json.dumps(DOCUMENT).count("$ref")
    assert references >= len(POSTS)
