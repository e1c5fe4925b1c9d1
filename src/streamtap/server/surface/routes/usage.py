"""GET /v1/usage."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from streamtap.server.service import Service
from streamtap.server.surface.bodies import presented_key
from streamtap.server.surface.trace import trace_of


class Usage:
    """What a key has used of its limits."""

    def __init__(self, service: Service) -> None:
        self._admission = service.admission

    async def mine(self, request: Request) -> JSONResponse:
        """What the key of this request has used, and what it has left."""
        key = await self._admission.authenticate(presented_key(request.scope["headers"]))
        trace_of(request.scope).key_prefix = key.prefix
        return JSONResponse(await self._admission.call(self._admission.ledger.usage, key))
