"""What ``/openapi.json`` says: every address, what it takes, and the one shape of an error."""

from __future__ import annotations

from typing import Any

import streamtap
from streamtap.server.harvests.waiting import MOST_SECONDS
from streamtap.wire.harvest import HarvestBody
from streamtap.wire.harvest_jobs import STATES
from streamtap.wire.requests import CompletionBody
from streamtap.wire.safetensors_body import MEDIA_TYPE

_SCHEMAS = "#/components/schemas/"
_BODIES = (CompletionBody, HarvestBody)
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
_TIME = {"type": ["string", "null"], "format": "date-time"}
_JOB = {
    "type": "object",
    "required": ["job_id", "status", "model", "n_prompts"],
    "properties": {
        "job_id": {"type": "string"},
        "status": {"enum": list(STATES)},
        "model": {"type": "string"},
        "n_prompts": {"type": "integer"},
        "run_id": {"type": "string"},
        "created_at": _TIME,
        "completed_at": _TIME,
        "progress": {
            "type": "object",
            "properties": {"prompts_done": {"type": "integer"}, "shards_done": {"type": "integer"}},
        },
        "result": {
            "type": "object",
            "description": "Once it is done and while its files are kept: links that need no key.",
            "properties": {
                "n_shards": {"type": "integer"},
                "layer_indices": {"type": "array", "items": {"type": "integer"}},
                "manifest_url": {"type": "string"},
                "shard_urls": {"type": "array", "items": {"type": "string"}},
                "stats_url": {"type": "string"},
                "timings": {"type": "object"},
            },
        },
        "urls_expire_at": _TIME,
        "accounting": {
            "type": "object",
            "properties": {
                "wall_clock_s": {"type": "number"},
                "in_container_s": {"type": "number"},
                "unaccounted_s": {"type": "number"},
            },
        },
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
    bodies = {kind.__name__: kind.model_json_schema(ref_template=_SCHEMAS + "{model}") for kind in _BODIES}
    definitions = {name: found for body in bodies.values() for name, found in body.pop("$defs", {}).items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Streamtap",
            "version": streamtap.__version__,
            "description": "Completions with the residual stream beside them, and bulk jobs that write it to files.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {
                **definitions,
                **bodies,
                "Completion": _COMPLETION,
                "HarvestJob": _JOB,
                "Error": _ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    keyed: dict[str, Any] = {"security": [{"key": []}]}
    return {
        "/v1/completions": {"post": {**keyed, **_completions()}},
        "/v1/chat/completions": {"post": {"summary": "Always refused", "responses": _failing()}},
        "/v1/models": {"get": {**keyed, **_reads("Models and what they can do")}},
        "/v1/models/{model_id}/status": {
            "get": {**keyed, **_reads("Whether a model is warm"), "parameters": [_path("model_id")]}
        },
        "/v1/usage": {"get": {**keyed, **_reads("What this key has used")}},
        "/v1/harvest": {
            "post": {**keyed, **_takes("Submit a bulk job", "HarvestBody", "202", _job())},
            "get": {**keyed, **_reads("The newest jobs of this key")},
        },
        "/v1/harvest/{job_id}": _one_job(keyed),
        "/v1/harvest/files/{run_id}/{name}": {"get": _file()},
        "/health": {"get": _reads("How the server and its engines are")},
        "/metrics": {"get": _reads("Counters for Prometheus", "text/plain", _TEXT)},
    }


def _completions() -> dict[str, Any]:
    answers = {
        "application/json": {"schema": {"$ref": _SCHEMAS + "Completion"}},
        "text/event-stream": {"schema": _EVENT},
        MEDIA_TYPE: {"schema": _BINARY},
    }
    return _takes("Complete prompts, capture and steer the residual stream", "CompletionBody", "200", answers)


def _one_job(keyed: dict[str, Any]) -> dict[str, Any]:
    wait = {
        "name": "wait",
        "in": "query",
        "description": "Answer once the job is over, or after so many seconds.",
        "schema": {"type": "number", "minimum": 0, "maximum": MOST_SECONDS},
    }
    return {
        "parameters": [_path("job_id")],
        "get": {**keyed, **_answers("Look at a bulk job, or wait for it", "200", _job()), "parameters": [wait]},
        "delete": {**keyed, **_answers("Cancel a bulk job", "200", _job())},
    }


def _file() -> dict[str, Any]:
    signed = [
        {"name": name, "in": "query", "required": True, "schema": {"type": "string"}}
        for name in ("expires", "signature")
    ]
    content = {"application/octet-stream": {"schema": _BINARY}, "application/json": {"schema": {"type": "object"}}}
    told = _answers("A file of a run, by a signed link that needs no key", "200", content)
    told["responses"] |= {
        "206": {"description": "The bytes that Range names", "content": content},
        "304": {"description": "The caller has it as it is"},
    }
    return {**told, "parameters": [_path("run_id"), _path("name"), *signed]}


def _job() -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _SCHEMAS + "HarvestJob"}}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _takes(summary: str, body: str, status: str, answers: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + body}}}
    return {**_answers(summary, status, answers), "requestBody": {"required": True, "content": content}}


def _answers(summary: str, status: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {status: {"description": "The answer", "content": content}, **_failing()}}


def _reads(summary: str, media: str = "application/json", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return _answers(summary, "200", {media: {"schema": schema or {"type": "object"}}})


def _failing() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}
    return {"default": {"description": "An error", "content": content}}
