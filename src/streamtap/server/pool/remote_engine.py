"""An engine that somebody else runs, at an address of the configuration."""

from __future__ import annotations

import asyncio

from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.pool.engine_health import HealthCheck


class RemoteEngine:
    """A ``RunningEngine`` that is neither started nor stopped here."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stopped = asyncio.Event()
        self.health = HealthCheck(endpoint)

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        return self._endpoint

    async def ended(self) -> str:
        """Return once it is no longer used."""
        await self._stopped.wait()
        return "it is no longer used"

    async def answers(self) -> bool:
        """Whether it still answers."""
        return (await self.health.ask()).ready

    async def stop(self) -> None:
        """Use it no longer."""
        self._stopped.set()
        await self.health.close()
