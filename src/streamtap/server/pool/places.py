"""How many engine processes may run at a time, those asleep not counted, and who gets the next place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from streamtap.server.clock import Clock


class Places:
    """Counts places; who waits for one is served in order."""

    def __init__(self, count: int, clock: Clock) -> None:
        self._free = count
        self._clock = clock
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()

    async def take(self, make_room: Callable[[], Awaitable[float]]) -> None:
        """Take a place; while there is none, ``make_room`` tries to free one, and says when to ask it again at most.

        It is asked as soon as something changed, and after as many seconds as it returned.
        """
        async with self._turn:
            while not self._free:
                self._change.clear()
                seconds = await make_room()
                if not self._free:
                    await self._changed_within(seconds)
            self._free -= 1

    def give_back(self) -> None:
        """A process ended, or fell asleep."""
        self._free += 1
        self._change.set()

    def changed(self) -> None:
        """Somebody let go of an engine, so that ``make_room`` may succeed now."""
        self._change.set()

    async def _changed_within(self, seconds: float) -> None:
        changed = asyncio.ensure_future(self._change.wait())
        try:
            await self._clock.wait(changed, seconds)
        finally:
            changed.cancel()
