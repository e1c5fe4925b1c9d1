"""What ``/openapi.json`` says: every address, what it takes, and the one shape of an error."""

from __future__ import annotations

from typing import Any

import streamtap
from streamtap.wire.requests import CompletionBody
from streamtap.wire.safetensors_body import MEDIA_TYPE

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error", "request_id"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "retryable"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "retryable": {"type": "boolean"},
                "retry_after_seconds": {"type": "integer"},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_COMPLETION = {
    "type": "object",
    "description": "A completion; or, where the status was sent before the engine was ready, an error.",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "usage": {"type": "object"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "activations": {"type": "object"},
        "error": {"type": "object"},
    },
}
#: Their bodies are one string to OpenAPI, whatever is in it.
_TEXT = {"type": "string"}
_BINARY = {"type": "string", "format": "binary"}
#: Each event of a stream: a chunk of a completion as JSON, an error, or the word that ends it.
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}


def document() -> dict[str, Any]:
    """The OpenAPI document of the service."""
    body = CompletionBody.model_json_schema(ref_template=_SCHEMAS + "{model}")
    definitions = body.pop("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Streamtap",
            "version": streamtap.__version__,
            "description": "Completions with the model's residual stream beside them.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**definitions, "CompletionBody": body, "Completion": _COMPLETION, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    model = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    keyed: dict[str, Any] = {"security": [{"key": []}]}
    return {
        "/v1/completions": {"post": {**keyed, **_completions()}},
        "/v1/chat/completions": {"post": {"summary": "Always refused", "responses": _failing()}},
        "/v1/models": {"get": {**keyed, **_reads("Models and what they can do")}},
        "/v1/models/{model_id}/status": {"get": {**keyed, **_reads("Whether a model is warm"), "parameters": [model]}},
        "/v1/usage": {"get": {**keyed, **_reads("What this key has used")}},
        "/health": {"get": _reads("How the server and its engines are")},
        "/metrics": {"get": _reads("Counters for Prometheus", "text/plain", _TEXT)},
    }


def _completions() -> dict[str, Any]:
    answers = {
        "application/json": {"schema": {"$ref": _SCHEMAS + "Completion"}},
        "text/event-stream": {"schema": _EVENT},
        MEDIA_TYPE: {"schema": _BINARY},
    }
    return {
        "summary": "Complete prompts, capture and steer the residual stream",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "CompletionBody"}}},
        },
        "responses": {"200": {"description": "The answer", "content": answers}, **_failing()},
    }


def _reads(summary: str, media: str = "application/json", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    told = {media: {"schema": schema or {"type": "object"}}}
    return {"summary": summary, "responses": {"200": {"description": "The answer", "content": told}, **_failing()}}


def _failing() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}
    return {"default": {"description": "An error", "content": content}}
