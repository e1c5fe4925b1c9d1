"""Asks an engine how it is: whether it answers, at which stage it stands, and whether it takes our key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2

from streamtap.server.pool.endpoint import Endpoint

_SECONDS = 5.0
_REFUSALS = (401, 403)


@dataclass(frozen=True)
class Health:
    """``stage`` and ``label`` where the engine told them; ``failed`` when it said that it will never be ready."""

    reached: bool
    ready: bool = False
    failed: bool = False
    stage: str | None = None
    label: str | None = None


class HealthCheck:
    """Asks one engine; to be closed."""

    def __init__(self, endpoint: Endpoint) -> None:
        # A proxy of the environment has no business between us and our own engines.
        self._client = httpx2.AsyncClient(timeout=_SECONDS, trust_env=False)
        self._endpoint = endpoint

    async def ask(self) -> Health:
        """How the engine is now."""
        response = await self._get("/health")
        if response is None:
            return Health(reached=False)
        if response.status_code == 200:
            return Health(reached=True, ready=True)
        told = _object(response)
        return Health(
            reached=True,
            failed=response.status_code == 500 and "error" in told,
            stage=_text(told.get("stage")),
            label=_text(told.get("stage_label")),
        )

    async def takes_our_key(self) -> bool:
        """Whether it is the engine that our key is for."""
        response = await self._get("/v1/models")
        return response is not None and response.status_code not in _REFUSALS

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _get(self, path: str) -> httpx2.Response | None:
        if self._client.is_closed:  # by one who found the engine dead while another was about to look
            return None
        try:
            return await self._client.get(self._endpoint.base_url + path, headers=dict(self._endpoint.headers))
        except httpx2.HTTPError:  # nothing listens there yet, or no longer
            return None


def _object(response: httpx2.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return value[:100] if isinstance(value, str) else None
