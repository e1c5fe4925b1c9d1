"""vLLM's sleep mode over HTTP: weights go to the host's memory, and come back."""

from __future__ import annotations

import asyncio

import httpx2

from streamtap.errors import EngineFailed, EngineUnreachable
from streamtap.server.pool.endpoint import Endpoint

#: Level 1 keeps the weights, in the host's memory; level 2 would drop them.
_SLEEP = "/sleep?level=1"
_WAKE_UP = "/wake_up"
_IS_SLEEPING = "/is_sleeping"
_LOOK_SECONDS = 0.25


async def fall_asleep(endpoint: Endpoint) -> None:
    """Return once the engine sleeps; how long that may take is the caller's to say.

    Raises:
        EngineFailed: it has no sleep mode, or could not; ``EngineUnreachable`` where it does not answer.
    """
    await _asked(endpoint, _SLEEP, asleep=True)


async def wake_up(endpoint: Endpoint) -> None:
    """Return once the engine no longer sleeps; how long that may take is the caller's to say.

    Raises:
        EngineFailed: it could not; ``EngineUnreachable`` where it does not answer.
    """
    await _asked(endpoint, _WAKE_UP, asleep=False)


async def _asked(endpoint: Endpoint, path: str, *, asleep: bool) -> None:
    # A proxy of the environment has no business between us and our own engines.
    async with httpx2.AsyncClient(
        base_url=endpoint.base_url, headers=dict(endpoint.headers), timeout=None, trust_env=False
    ) as client:
        await _sent(client, "POST", path)
        # Some versions answer before they are done.
        while await _sleeps(client) != asleep:
            await asyncio.sleep(_LOOK_SECONDS)


async def _sleeps(client: httpx2.AsyncClient) -> bool:
    response = await _sent(client, "GET", _IS_SLEEPING)
    try:
        told = response.json()
    except ValueError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("is_sleeping"), bool):
        raise EngineFailed(f"it does not say at {_IS_SLEEPING} whether it sleeps.")
    return bool(told["is_sleeping"])


async def _sent(client: httpx2.AsyncClient, method: str, path: str) -> httpx2.Response:
    try:
        response = await client.request(method, path)
    except httpx2.HTTPError as error:
        raise EngineUnreachable(f"it does not answer at {path} ({type(error).__name__}).") from error
    if response.status_code != 200:
        off = ", so it was started without sleep mode" if response.status_code == 404 else "; its log may say why"
        raise EngineFailed(f"it answers {response.status_code} at {path}{off}.")
    return response
