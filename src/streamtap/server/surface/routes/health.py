"""GET /health and /metrics: for those who run the service; neither needs a key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import streamtap
from streamtap.server.service import Service


class Health:
    """How the gateway and its engines are."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> JSONResponse:
        """Whether new requests are taken, and the state of each engine."""
        stopping = self._service.stopping.begun
        told = {
            "status": "stopping" if stopping else "ok",
            "version": streamtap.__version__,
            "engines": self._service.pool.states(),
        }
        return JSONResponse(told, status_code=503 if stopping else 200)

    async def metrics(self, request: Request) -> Response:
        """Counters in Prometheus's text format."""
        metrics = self._service.metrics
        metrics.queued.set(self._service.admission.waiting)
        metrics.engines(self._service.pool.states())
        return Response(metrics.text(), media_type=metrics.content_type)
