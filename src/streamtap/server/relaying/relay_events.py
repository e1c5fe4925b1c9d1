"""Passes an engine's server-sent events on, each as soon as it is whole, and reads the usage that ends them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from streamtap.completion import Usage
from streamtap.errors import BadJson, EngineDead, EngineFailed
from streamtap.server.relaying.upstream import read_said
from streamtap.server.surface.reply import Reply
from streamtap.wire.reading import read_json
from streamtap.wire.scan import read_usage
from streamtap.wire.sse import DONE

_END = b"\n\n"
_DATA = b"data:"
#: Inside a JSON string these quotes would have backslashes, so a text cannot bring them about.
_TELLS = re.compile(rb'"(?:usage|error)"\s*:\s*\{')
#: How an event ends in a stream with usage; a client that did not ask for it gets none of this.
_NO_USAGE = re.compile(rb',\s*"usage"\s*:\s*null\s*\}\s*\Z')
#: How long an engine may take to end a body after its last event.
_END_SECONDS = 1.0
_MOST_EVENT_BYTES = 64 * 1024 * 1024
Settle = Callable[[Usage], Awaitable[None]]


async def relay_events(
    pieces: AsyncIterator[bytes], reply: Reply, *, include_usage: bool, ran: Callable[[int], None], settle: Settle
) -> None:
    """Pass the events in ``pieces`` on; ``ran`` is told how many brought text, ``settle`` is called before the last.

    Raises:
        EngineDead: the events ended early.
        EngineFailed: one of them is an error, or none says what was used.
    """
    usage: Usage | None = None
    written = 0
    async for event in _events(pieces):
        if event.strip() == DONE.strip():
            await _finish(usage, reply, settle)
            await _read_out(pieces)
            return
        found = _read(event)
        if "error" in found:
            raise read_said(found, 500)
        if found and not found.get("choices"):
            usage = read_usage(found.get("usage")) or usage
            if include_usage:
                await reply.write(event)
            continue
        written += event.startswith(_DATA)
        ran(written)
        await reply.write(event if include_usage else _NO_USAGE.sub(b"}" + _END, event))
    raise EngineDead("the model's engine ended in the middle of its answer; send the request again.")


async def _finish(usage: Usage | None, reply: Reply, settle: Settle) -> None:
    if usage is None:
        raise EngineFailed("the model's engine sent an answer without usage; send the request again.")
    await settle(usage)
    await reply.finish(DONE)


async def _read_out(pieces: AsyncIterator[bytes]) -> None:
    """Take what ends the body too: its connection stays of use, and the engine does not see a client that leaves."""
    with suppress(TimeoutError, EngineDead):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in pieces:
                pass


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole events, each with the empty line that ends it."""
    held = b""
    async for piece in pieces:
        held += piece
        *whole, held = held.split(_END)
        for event in whole:
            yield event + _END
        if len(held) > _MOST_EVENT_BYTES:
            raise EngineFailed("the model's engine sent an event without an end; send the request again.")


def _read(event: bytes) -> dict[str, Any]:
    """The event's data where it says something that the service must know, else nothing."""
    if not event.startswith(_DATA) or not _TELLS.search(event):
        return {}
    try:
        found = read_json(event[len(_DATA) :])
    except BadJson as error:
        raise EngineFailed("the model's engine sent an event that is not JSON; send the request again.") from error
    return found if isinstance(found, dict) else {}
