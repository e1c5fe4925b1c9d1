"""How an engine that is to start comes by a place: from an idle one at once, from one that is always busy in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from streamtap.server.clock import Clock
from streamtap.server.pool.slot import Slot

#: How long a start waits for an engine to fall idle, and how long each engine runs at least, before one has to yield.
_PATIENCE_SECONDS = 10.0
#: Longer than clients stay away that were told to come again for an engine that starts.
_UNWANTED_SECONDS = 45.0


class MakingRoom:
    """The wait of one start for its place; to be closed once that is over, however it ended.

    ``rest`` parks an engine that nobody uses, or stops it, and returns once its place is free.
    """

    def __init__(
        self, waiting: Slot, slots: Sequence[Slot], clock: Clock, rest: Callable[[Slot], Awaitable[None]]
    ) -> None:
        self._waiting = waiting
        self._slots = slots
        self._clock = clock
        self._rest = rest
        self._since = clock.monotonic()
        self._yielding: Slot | None = None

    async def make(self) -> float:
        """Let the engine rest that was used least recently of those that may, or ask one to yield.

        The return value is after how many seconds there may be more to do.

        Raises:
            asyncio.CancelledError: nobody has waited for this start for a while, so that no other engine is to go.
        """
        if (wanted := self._wanted_seconds()) <= 0:
            raise asyncio.CancelledError("nobody waits for it")
        free = [slot for slot in self._slots if slot.may_make_room]
        if free:
            await self._rest(min(free, key=lambda slot: slot.last_used))
            return 0.0
        return min(wanted, self._ask())

    def close(self) -> None:
        """Let the engine go on that was asked to yield."""
        if self._yielding is not None:
            self._yielding.goes_on()

    def _wanted_seconds(self) -> float:
        """How long this start may still wait."""
        left = self._waiting.last_used + _UNWANTED_SECONDS - self._clock.monotonic()
        return _UNWANTED_SECONDS if self._waiting.users else left

    def _ask(self) -> float:
        """Ask the engine that has run longest to yield, when it is time; in how many seconds to look again."""
        busy = [slot for slot in self._slots if slot.engine is not None and slot.is_process]
        if not busy or (self._yielding is not None and not self._yielding.admits.is_set()):
            return _PATIENCE_SECONDS
        oldest = min(busy, key=lambda slot: slot.ready_since)
        left = max(self._since, oldest.ready_since) + _PATIENCE_SECONDS - self._clock.monotonic()
        if left > 0:
            return left
        oldest.yields()
        self._yielding = oldest
        return 0.0 if oldest.may_make_room else _PATIENCE_SECONDS
