"""A request under way in the engine: its events carried over to the event loop, its work stopped at most once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from streamtap.completion import Cancel, Delta, Event, Failed, Finished


class Flight:
    """Made on the event loop; ``emit`` is for the engine's thread, everything else for the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._came = asyncio.Event()
        self._cancel: Cancel | None = None
        self._over = False

    def emit(self, event: Event) -> None:
        """Hand ``event`` to the loop; it never waits."""
        # A loop that is closed has no one left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, event)

    def begun(self, cancel: Cancel) -> None:
        """Remember how to stop the work."""
        self._cancel = cancel

    async def next(self) -> list[Event]:
        """All events that came since the last call, one at least."""
        await self._came.wait()
        self._came.clear()
        events = list(self._events)
        self._events.clear()
        return events

    async def last(self) -> Finished | Failed:
        """The event that ends the request; deltas before it are passed over."""
        while True:
            for event in await self.next():
                if not isinstance(event, Delta):
                    return event

    @property
    def is_pending(self) -> bool:
        """Whether there is work to stop."""
        return self._cancel is not None and not self._over

    def stop(self) -> None:
        """Stop the work; from any thread, since an engine may take a step to do it."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def forget(self) -> None:
        """Let go of the work and of what it gave: each holds the other, and the collector comes by too seldom."""
        self._cancel = None
        self._events.clear()

    def _put(self, event: Event) -> None:
        self._over = self._over or not isinstance(event, Delta)
        self._events.append(event)
        self._came.set()
