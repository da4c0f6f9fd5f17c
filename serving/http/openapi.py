"""The OpenAPI document, made from the types that requests are decoded into."""

from typing import Any, cast

import msgspec

from gdn_jax import __version__
from gdn_jax.serving.http.schemas import (
    NEUTRAL,
    NO_OPS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REFERENCE = "#/components/schemas/{name}"
_BODIES = {
    "/v1/completions": (CompletionRequest, "Complete prompts; a stream of events if `stream` is true."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation; a stream of events if `stream` is true."),
    "/tokenize": (TokenizeRequest, "Text or a conversation to token ids."),
    "/detokenize": (DetokenizeRequest, "Token ids to text."),
}
_READS = {
    "/health": "Whether the process is alive.",
    "/ready": "Whether requests are taken.",
    "/version": "The version of the server.",
    "/v1/models": "The names of the model.",
    "/metrics": "Metrics in Prometheus' text form.",
    "/openapi.json": "This document.",
}
# What msgspec cannot say in a type: a union of lists, and messages that keep fields nobody lists.
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "description": "A text, token ids, or a list of either.",
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ],
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "description": "Text, or text parts; null only from an assistant.",
                "anyOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
                        },
                    },
                    {"type": "null"},
                ],
            },
            "reasoning_content": _TEXT,
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "tool_call_id": _TEXT,
            "name": _TEXT,
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document() -> dict[str, object]:
    """Return the document."""
    _, schemas = msgspec.json.schema_components([kind for kind, _ in _BODIES.values()], ref_template=_REFERENCE)
    for schema in schemas.values():
        _complete(cast("dict[str, dict[str, Any]]", schema.get("properties", {})))
    schemas["Error"] = _ERROR
    paths: dict[str, object] = {path: {"get": _operation(text)} for path, text in _READS.items()}
    named = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    paths["/v1/models/{model}"] = {"get": {**_operation("One name of the model."), "parameters": [named]}}
    for path, (kind, text) in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
        paths[path] = {"post": {**_operation(text), "requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "gdn-jax", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _complete(properties: dict[str, dict[str, Any]]) -> None:
    """Add to the fields of a type what its annotations do not say."""
    for name, schema in properties.items():
        if name == "prompt" and "array" in str(schema):
            schema |= _PROMPT
        elif name == "messages":
            nullable = "anyOf" in schema
            schema.pop("anyOf", None)
            schema |= {"anyOf": [_MESSAGES, {"type": "null"}]} if nullable else _MESSAGES
        elif name in NO_OPS:
            schema["description"] = f"Accepted, and without effect: {NO_OPS[name]}."
        elif name in NEUTRAL and "type" not in schema and "anyOf" not in schema:
            schema["description"] = "Not supported."
            schema["enum"] = [*NEUTRAL[name], None]


def _operation(text: str) -> dict[str, object]:
    error = {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}}
    return {
        "summary": text,
        "responses": {"200": {"description": "The answer."}, "default": {"description": "An error.", **error}},
    }
