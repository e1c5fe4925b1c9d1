"""vLLM's sleep mode before a fake engine: ``POST /sleep`` and ``/wake_up``, ``GET /is_sleeping``, none with a key."""

from __future__ import annotations

import asyncio
import logging
import os
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_LOG = logging.getLogger(__name__)
#: It cannot sleep or wake and says so, says nothing, ends in the middle, or says that it is done where it is not.
SLEEP_FAULTS = ("sleep-fails", "sleep-hangs", "sleep-dies", "wake-fails", "wake-hangs", "wake-dies", "wake-lies")
_DEAD = 71
_FOR_EVER_SECONDS = 3600.0


class FakeSleep:
    """An application that sleeps in front of another.

    A completion that comes while it is not wholly awake ends the process, as one that reads memory that is gone would.
    """

    def __init__(self, app: ASGIApp, sleep_seconds: float, wake_seconds: float, fault: str | None) -> None:
        self._app = app
        self._seconds = {"sleep": sleep_seconds, "wake": wake_seconds}
        self._fault = fault
        self._is_asleep = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        response = await self._response(scope["method"], scope["path"], scope["query_string"])
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _response(self, method: str, path: str, query: bytes) -> Response | None:
        if (method, path) == ("POST", "/sleep"):
            if parse_qs(query) != {b"level": [b"1"]}:
                return Response("level 1 is all that it has", 400)
            self._is_asleep = True
            return await self._done("sleep")
        if (method, path) == ("POST", "/wake_up"):
            response = await self._done("wake")
            self._is_asleep = self._fault == "wake-lies"
            return response
        if (method, path) == ("GET", "/is_sleeping"):
            return JSONResponse({"is_sleeping": self._is_asleep})
        if path == "/v1/completions" and self._is_asleep:
            _LOG.error("a request came while the engine slept")
            os._exit(_DEAD)
        return None

    async def _done(self, what: str) -> Response:
        _LOG.info("told to %s", what)
        await asyncio.sleep(_FOR_EVER_SECONDS if self._fault == f"{what}-hangs" else self._seconds[what])
        if self._fault == f"{what}-dies":
            os._exit(_DEAD)
        return Response(status_code=500 if self._fault == f"{what}-fails" else 200)
