"""Server-sent events of a completion that streams."""

from __future__ import annotations

from typing import Any

from streamtap.completion import Delta, Usage
from streamtap.errors import StreamtapError
from streamtap.wire.answers import usage_object
from streamtap.wire.errors import error_document
from streamtap.wire.logprobs import logprobs_object
from streamtap.wire.reading import write_json

MEDIA_TYPE = "text/event-stream"
#: The last event of a stream that went well.
DONE = b"data: [DONE]\n\n"
#: A comment, which readers drop; it keeps proxies from cutting a silent stream.
KEEPALIVE = b": keepalive\n\n"


def chunk_event(delta: Delta, *, id: str, created: int, model: str, include_usage: bool = False) -> bytes:
    """Text that is certain now; with ``include_usage`` the chunk says that its usage is null, as OpenAI's do."""
    choice = {
        "index": delta.index,
        "text": delta.text,
        "logprobs": logprobs_object(delta.logs) if delta.logs else None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    usage = {"usage": None} if include_usage else {}
    return _event(_chunk([choice], id=id, created=created, model=model) | usage)


def usage_event(usage: Usage, *, id: str, created: int, model: str) -> bytes:
    """The chunk without a choice that comes before ``DONE`` where usage was asked for."""
    return _event(_chunk([], id=id, created=created, model=model) | {"usage": usage_object(usage)})


def error_event(error: StreamtapError, request_id: str | None) -> bytes:
    """The last event of a stream that failed; nothing comes after it."""
    return _event(error_document(error, request_id))


def _chunk(choices: list[dict[str, Any]], *, id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": created, "model": model, "choices": choices}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + write_json(document) + b"\n\n"
