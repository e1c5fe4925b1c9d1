"""A completion as server-sent events: a chunk for each delta, as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from streamtap.completion import Delta, Event, Failed, Finished
from streamtap.engines.worker.clients import Client
from streamtap.engines.worker.flights import Flight
from streamtap.wire.sse import DONE, KEEPALIVE, MEDIA_TYPE, chunk_event, error_event, usage_event

_HEADERS = {"content-type": MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Naming:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str


async def stream_answer(
    client: Client, flight: Flight, naming: Naming, *, include_usage: bool, keepalive_seconds: float
) -> Finished | Failed:
    """Send the events of ``flight`` until its last, which is returned; a comment where none came for a while.

    A request that fails before anything was sent is not answered here, so that its status can tell.

    Raises:
        ClientDisconnect: the client left.
    """
    while True:
        events = await client.wait_for(flight.next(), keepalive_seconds)
        last = _last(events or ())
        if isinstance(last, Failed) and client.status is None:
            return last
        if client.status is None:
            await client.start(200, _HEADERS)
        if events is None:
            await client.send(KEEPALIVE, last=False)
            continue
        parts = [_written(event, naming, include_usage, client.request_id) for event in events]
        await client.send(b"".join(parts), last=last is not None)
        if last is not None:
            return last


def _last(events: Iterable[Event]) -> Finished | Failed | None:
    return next((event for event in events if not isinstance(event, Delta)), None)


def _written(event: Event, naming: Naming, include_usage: bool, request_id: str) -> bytes:
    named: dict[str, Any] = asdict(naming)
    if isinstance(event, Delta):
        return chunk_event(event, **named, include_usage=include_usage)
    if isinstance(event, Failed):
        return error_event(event.error, request_id)
    return (usage_event(event.usage, **named) if include_usage else b"") + DONE
