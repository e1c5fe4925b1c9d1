"""An engine that answers at once and computes nothing: what is measured behind it is the gateway alone.

``python benchmarks/engine_stub.py PORT`` answers ``/v1/completions`` with a small completion, or, asked for a
capture, with an envelope of the declared shape whose ``data`` is as many megabytes as the model's name says:
``stub-500``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pybase64
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LAYERS, HIDDEN = 32, 4096
_PIECE = pybase64.b64encode(bytes(range(256)) * 3072)


def main() -> int:
    """Serve until stopped."""
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    return 0


async def health(_request: Request) -> Response:
    """It is there."""
    return JSONResponse({"stage": "ready"})


async def models(_request: Request) -> Response:
    """As a worker of ours: what it sends is passed on as it is, where a vLLM's rows would be looked at."""
    return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model", "owned_by": "streamtap"}]})


async def complete(request: Request) -> Response:
    """A completion of one token."""
    asked: dict[str, Any] = json.loads(await request.body())
    answer = {
        "id": "cmpl-stub",
        "object": "text_completion",
        "created": 0,
        "model": asked["model"],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
        "choices": [{"index": 0, "text": " x", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    }
    if not (asked.get("vllm_xargs") or {}).get("output_residual_stream"):
        return JSONResponse(answer)
    return StreamingResponse(_large(answer, int(asked["model"].rpartition("-")[2])), media_type="application/json")


async def _large(answer: dict[str, Any], megabytes: int) -> AsyncIterator[bytes]:
    head = {"dtype": "int16", "original_dtype": "torch.bfloat16", "shape": [LAYERS, 5, HIDDEN], "compression": "zstd"}
    opened = json.dumps({**answer, "activations": {"residual_stream": {**head, "data": ""}}})
    yield opened.removesuffix('"}}}').encode()
    for _ in range(megabytes * 1_000_000 // len(_PIECE)):
        yield _PIECE
    yield b'"}}}'


if __name__ == "__main__":
    sys.exit(main())
