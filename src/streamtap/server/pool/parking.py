"""Engines that sleep instead of ending: which of them the host has room for, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from streamtap.errors import EngineFailed, EngineUnreachable
from streamtap.server.clock import Clock
from streamtap.server.pool.endpoint import Sleeps
from streamtap.server.pool.host_memory import Host, Memory
from streamtap.server.pool.slot import Slot

#: What a copy of the weights may take of the host's memory at most: each pinned block is rounded up to a power of two.
_COPY = 2
#: Parts of the host's memory: what parking leaves for others, and what has to be free while engines are parked.
_LEFT = 0.1
_SHORT = 0.05
_LOOK_SECONDS = 2.0
#: To pin the host's memory, once for each process, takes far longer than to copy weights back.
_SLEEP_SECONDS = 120.0
_WAKE_SECONDS = 60.0


class Parking:
    """Parks at most ``most`` engines, as long as ``host`` has the memory.

    ``stop`` ends the engine of a slot for a reason, and returns once it ended.
    """

    def __init__(
        self, slots: Sequence[Slot], host: Host, most: int, clock: Clock, stop: Callable[[Slot, str], Awaitable[None]]
    ) -> None:
        self._slots = slots
        self._host = host
        self._most = most
        self._clock = clock
        self._stop = stop
        self._watching: asyncio.Task[None] | None = None

    async def refusal(self, slot: Slot) -> str | None:
        """Why ``slot`` cannot be parked, in words; None where it can.

        Those that were parked first are ended for it where that gives the room that it needs.
        """
        if slot.copy_bytes is None:
            weights = await self._host.weights_bytes(slot.model)
            if weights is None:
                return "how large its weights are is not known, since their files are not on this machine"
            slot.copy_bytes = _COPY * weights
        while True:
            memory = self._host.memory()
            if memory is None:
                return "how much memory is free is not known on this system"
            lack, others = self._lack(slot, memory), self._asleep(but=slot)
            if lack <= 0 and self._staying(but=slot) < self._most:
                return None
            if lack > sum(each.copy_bytes or 0 for each in others) / _COPY:
                return _too_little(slot, memory)
            if not others:
                return f"{self._most} are parked already, and no more may be"
            await self._stop(others[0], "it makes room for another that is parked")

    async def put_to_sleep(self, engine: Sleeps) -> EngineFailed | None:
        """Put ``engine`` to sleep; what kept it from that."""
        return await self._within(engine.sleep(), _SLEEP_SECONDS)

    async def wake(self, engine: Sleeps) -> EngineFailed | None:
        """Wake ``engine``; what kept it from that."""
        return await self._within(engine.wake_up(), _WAKE_SECONDS)

    def watch(self) -> None:
        """As long as an engine is parked, see that the host's memory does not get short for the others."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Watch no longer."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while any(slot.is_parked for slot in self._slots):
            await self._clock.sleep(_LOOK_SECONDS)
            memory, asleep = self._host.memory(), self._asleep()
            if asleep and memory is not None and memory.available < _SHORT * memory.total:
                await self._stop(asleep[0], "the host's memory is short")

    async def _within(self, doing: Coroutine[Any, Any, None], seconds: float) -> EngineFailed | None:
        task = asyncio.ensure_future(doing)
        try:
            if not await self._clock.wait(task, seconds):
                return EngineUnreachable(f"it took longer than {seconds:.0f} s.")
            task.result()
        except EngineFailed as error:
            return error
        finally:
            task.cancel()
        return None

    def _asleep(self, but: Slot | None = None) -> list[Slot]:
        """Those that are asleep and nobody wakes, the one first that was used least recently."""
        found = [
            slot
            for slot in self._slots
            if slot.is_parked and slot.parking is None and slot.starting is None and slot is not but
        ]
        return sorted(found, key=lambda slot: slot.last_used)

    def _staying(self, but: Slot) -> int:
        """How many are asleep or on their way to it, and nobody wakes them."""
        return sum(slot.is_parked and slot.starting is None for slot in self._slots if slot is not but)

    def _lack(self, slot: Slot, memory: Memory) -> float:
        """Bytes that are lacking for ``slot`` to sleep; a process keeps what it took for its copy until it ends."""
        takers = [each for each in self._slots if each is slot or each.parking is not None]
        needed = sum(each.copy_bytes or 0 for each in takers if not each.has_copy)
        left = _SHORT if slot.has_copy else _LEFT
        return needed + left * memory.total - memory.available


def _too_little(slot: Slot, memory: Memory) -> str:
    return (
        f"its weights may take {(slot.copy_bytes or 0) / 1e9:.1f} GB of the host's memory, of which "
        f"{memory.available / 1e9:.1f} GB are free and {_LEFT * memory.total / 1e9:.1f} GB are to stay so"
    )
