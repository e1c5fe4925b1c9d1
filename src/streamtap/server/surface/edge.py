"""The outermost layer: gives a request its id, lets none in while the server stops, and records how each ended."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamtap.server import log
from streamtap.server.clock import Clock
from streamtap.server.metrics import Metrics
from streamtap.server.stopping import Stopping
from streamtap.server.surface.problems import guarded, send_problem
from streamtap.server.surface.request_ids import HEADER, request_id_of
from streamtap.server.surface.trace import Trace

_COMPLETIONS = "/v1/completions"
#: Addresses as metrics and logs name them: a path from outside must not become a label.
_ENDPOINTS = {
    path: path
    for path in (
        _COMPLETIONS,
        "/v1/chat/completions",
        "/v1/models",
        "/v1/usage",
        "/v1/harvest",
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
    )
}
_ANSWERED_WHILE_STOPPING = ("/health", "/metrics")


class Edge:
    """Pure ASGI around the application, so that streaming and disconnects stay as they are."""

    def __init__(
        self, app: ASGIApp, *, clock: Clock, metrics: Metrics, stopping: Stopping, completions: ASGIApp
    ) -> None:
        """``completions`` answers the POSTs that most requests are, without the application's layers and routing."""
        self._app = app
        self._completions = completions
        self._clock = clock
        self._metrics = metrics
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace(
            request_id_of(scope["headers"]), _endpoint(scope["path"]), scope["method"], self._clock.monotonic()
        )
        trace.attach(scope)
        self._metrics.started()
        try:
            with self._stopping.counted():
                await self._answer(trace, scope, receive, self._telling(trace, send))
        finally:
            self._metrics.saw(trace)
            log.saw(trace, self._clock.monotonic() - trace.started)

    async def _answer(self, trace: Trace, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stopping.begun and scope["path"] not in _ANSWERED_WHILE_STOPPING:
            await send_problem(self._stopping.refusal(), trace, send)
        else:
            is_completion = scope["method"] == "POST" and scope["path"] == _COMPLETIONS
            await guarded(self._completions if is_completion else self._app, scope, receive, send)

    def _telling(self, trace: Trace, send: Send) -> Send:
        own = (HEADER, trace.request_id.encode())

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message["headers"] = [*message.get("headers", ()), own]
            elif trace.first_byte_at is None:
                trace.first_byte_at = self._clock.monotonic()
            await send(message)

        return telling


def _endpoint(path: str) -> str:
    if path.startswith("/v1/models/") and path.endswith("/status"):
        return "/v1/models/{id}/status"
    if path.startswith("/v1/harvest/"):
        return "/v1/harvest/files" if path.startswith("/v1/harvest/files/") else "/v1/harvest/{id}"
    return _ENDPOINTS.get(path, "other")
