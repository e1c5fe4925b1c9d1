"""Asks an engine for an answer, and says in our words why there is none."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from streamtap.errors import (
    BadJson,
    CaptureMissed,
    EngineFailed,
    EngineOutOfMemory,
    InvalidInput,
    StreamtapError,
    Unsupported,
)
from streamtap.server.relaying.engine_http import EngineConnections, EngineResponse, address_of
from streamtap.server.surface.request_ids import new_request_id
from streamtap.wire.errors import read_error
from streamtap.wire.reading import read_json, write_json

if TYPE_CHECKING:
    from streamtap.server.pool.pool import Endpoint

_MOST_ERROR_BYTES = 1 << 20
_MOST_TOLD_BYTES = 1 << 23
#: How long what answers at an address is taken for what it was.
_SURE_SECONDS = 10.0
_OURS = "streamtap"
#: How often vLLM took a request's memory away and ran it again from its beginning, one line an engine core.
_PREEMPTIONS = re.compile(rb"^vllm:num_preemptions(?:_total)?(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)
#: What an engine says by these is that the service is set up wrongly, or that it is too busy: not a caller's mistake.
_NOT_THE_CALLERS = frozenset({401, 403, 404, 405, 408, 429})
_ENGINES_OWN = (CaptureMissed, EngineOutOfMemory, EngineFailed)


class Upstream:
    """Asks engines on this machine or elsewhere; no proxy of the environment is used."""

    def __init__(self) -> None:
        self._connections = EngineConnections()
        self._is_ours: dict[str, tuple[float, bool]] = {}

    @asynccontextmanager
    async def ask(self, endpoint: Endpoint, payload: Mapping[str, Any], accept: str) -> AsyncIterator[EngineResponse]:
        """An engine's answer of status 200, its body to be read with ``chunks``; leaving the block stops the work.

        Raises:
            EngineUnreachable: nothing answers there.
            EngineDead: the connection broke before an answer.
            EngineFailed: it answered with an error of its own; ``CaptureMissed`` and ``EngineOutOfMemory`` alike.
            InvalidInput: the engine says that the request is wrong; ``Unsupported`` alike.
        """
        headers = {
            **endpoint.headers,
            "Accept": accept,
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            # Some engines mix up requests whose ids begin alike, so a caller's own never reaches them.
            "X-Request-Id": new_request_id(),
        }
        response = await self._connections.post(address_of(endpoint.base_url), headers, write_json(payload))
        try:
            if response.status_code != 200:
                raise _said(await _start_of(response), response.status_code)
            yield response
        finally:
            response.close()

    async def is_ours(self, endpoint: Endpoint) -> bool:
        """Whether a worker of ours answers there, which does all that it is asked, and checks what it sends.

        Raises:
            EngineUnreachable: nothing answers there; ``EngineDead`` alike.
            EngineFailed: it does not say what it serves.
        """
        until, known = self._is_ours.get(endpoint.base_url, (0.0, False))
        if time.monotonic() < until:
            return known
        raw = await self._told(endpoint, "/v1/models")
        if raw is None:
            raise EngineFailed("the model's engine does not say what it serves; try again in a moment.")
        found = any(model.get("owned_by") == _OURS for model in _models(raw))
        self._is_ours[endpoint.base_url] = (time.monotonic() + _SURE_SECONDS, found)
        return found

    async def preemptions(self, endpoint: Endpoint) -> float | None:
        """How often a vLLM there interrupted a request so far, None where it does not say.

        Raises:
            EngineUnreachable: nothing answers there; ``EngineDead`` alike.
        """
        found = _PREEMPTIONS.findall(await self._told(endpoint, "/metrics") or b"")
        return sum(map(float, found)) if found else None

    async def _told(self, endpoint: Endpoint, path: str) -> bytes | None:
        """What it answers to a GET, or None where that is an error."""
        headers = {**endpoint.headers, "Accept-Encoding": "identity"}
        response = await self._connections.post(address_of(endpoint.base_url, "GET", path), headers, b"")
        try:
            raw = await _start_of(response, _MOST_TOLD_BYTES)
            return raw if response.status_code == 200 else None
        finally:
            response.close()

    def close(self) -> None:
        """Close every connection that nobody uses."""
        self._connections.close()


def read_said(body: Mapping[str, Any], status: int) -> StreamtapError:
    """What an engine's error body means to the caller: their mistake, or a failure of the engine."""
    error = read_error(body, status)
    # A code of the engine's own that is none of ours stays with the error, and means nothing to our clients.
    has_our_code = "code" not in vars(error)
    if 400 <= status < 500 and status not in _NOT_THE_CALLERS:
        return error if has_our_code and isinstance(error, InvalidInput | Unsupported) else InvalidInput(str(error))
    if has_our_code and isinstance(error, _ENGINES_OWN):
        return error
    return EngineFailed(f"the model's engine answered with status {status}; try again in a moment.")


def _said(raw: bytes, status: int) -> StreamtapError:
    try:
        body = read_json(raw)
    except BadJson:
        body = None
    return read_said(body if isinstance(body, dict) else {}, status)


def _models(raw: bytes) -> list[dict[str, Any]]:
    try:
        body = read_json(raw)
    except BadJson:
        return []
    data = body.get("data") if isinstance(body, dict) else None
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []


async def _start_of(response: EngineResponse, most_bytes: int = _MOST_ERROR_BYTES) -> bytes:
    held = bytearray()
    async for chunk in response.chunks():
        held += chunk
        if len(held) > most_bytes:
            break
    return bytes(held)
