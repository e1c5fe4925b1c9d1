"""Runs engines: each start waits for its turn, each run is minded to its end, one that nobody uses may sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from streamtap.errors import EngineDead, EngineFailed, StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.pool.endpoint import Launches, RunningEngine, Sleeps
from streamtap.server.pool.engine_events import EngineEvent, EventKind, OnEvent
from streamtap.server.pool.host_memory import Host
from streamtap.server.pool.making_room import MakingRoom
from streamtap.server.pool.parking import Parking
from streamtap.server.pool.places import Places
from streamtap.server.pool.slot import Slot


class Runs:
    """Starts and stops the engines of ``slots``: at most ``max_engines`` are awake, and at most as many more parked."""

    def __init__(
        self, slots: Sequence[Slot], launcher: Launches, max_engines: int, clock: Clock, on_event: OnEvent, host: Host
    ) -> None:
        self._slots = slots
        self._launcher = launcher
        self._clock = clock
        self._on_event = on_event
        self._places = Places(max_engines, clock)
        self._parking = Parking(slots, host, max_engines, clock, self.stop)
        self._minding: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up every start and stop every engine."""
        starting = [slot.starting for slot in self._slots if slot.starting is not None]
        for task in starting:
            task.cancel()
        await self._parking.close()
        await asyncio.gather(*(self.stop(slot, "closing") for slot in self._slots))
        for minding in self._minding:
            minding.cancel()
        for over in (starting, list(self._minding)):
            if over:
                await asyncio.wait(over)

    def let_go(self) -> None:
        """Nobody holds some engine any more, so that it may make room for another."""
        self._places.changed()

    async def start(self, slot: Slot) -> StreamtapError | None:
        """Wake the engine or start it; the error that kept it from starting, for everyone who waits.

        The task of it is to be ``slot.starting``.
        """
        try:
            if slot.parking is not None:
                await asyncio.wait([slot.parking])
            engine, seconds = await self._woken(slot) or await self._launched(slot)
        except EngineFailed as error:
            self._give_back(slot)
            slot.died()
            slot.enter("failed")
            self._tell("failed", slot, detail=str(error))
            return error
        except BaseException as error:
            self._give_back(slot)
            slot.enter("parked" if slot.is_parked else "cold")
            if isinstance(error, asyncio.CancelledError) and error.args:  # with a reason: it gave up by itself
                self._tell("parked" if slot.is_parked else "stopped", slot, detail=str(error))
            raise
        finally:
            slot.starting = None
        if not slot.is_parked:
            self._mind(slot, engine)
        slot.rises(engine)
        self._tell("ready", slot, seconds=seconds)
        return None

    async def _woken(self, slot: Slot) -> tuple[RunningEngine, float] | None:
        """The engine that was parked and how long it took to wake; None where there is none, or it had to be ended."""
        if not slot.is_parked:
            return None
        self._begin(slot, "waking", "waking", "Waking up")
        await self._until_allowed(slot)
        engine, began = slot.parked, self._clock.monotonic()
        if engine is None:  # it ended while this waited for a place
            return None
        slot.enter("starting", "waking", "Waking up")
        fault = await self._parking.wake(engine)
        if slot.parked is not engine:
            return None
        if fault is not None:
            await self._end_for(slot, fault, f"it did not wake up: {fault}", "died")
            return None
        return engine, self._clock.monotonic() - began

    async def _launched(self, slot: Slot) -> tuple[RunningEngine, float]:
        """A new engine, and how long it took to start."""
        self._begin(slot, "starting")
        await self._until_allowed(slot)
        began = self._clock.monotonic()
        slot.generation += 1
        engine = await self._launcher.start(
            slot.model, slot.role, slot.generation, lambda stage, label: slot.enter("starting", stage, label)
        )
        return engine, self._clock.monotonic() - began

    def _begin(self, slot: Slot, kind: EventKind, stage: str | None = None, label: str | None = None) -> None:
        slot.enter("starting", stage, label)
        self._tell(kind, slot)

    async def _until_allowed(self, slot: Slot) -> None:
        """Wait for the engine's last run to be over, for the back-off, and for a place."""
        if slot.stopping is not None:
            await asyncio.wait([slot.stopping])
        if wait := slot.backoff_left_seconds():
            slot.enter("starting", "backing_off", "Waiting before the next start")
            await self._clock.sleep(wait)
        if slot.is_process and not slot.has_place:
            slot.enter("starting", "queued", "Waiting for another engine to stop")
            with closing(MakingRoom(slot, self._slots, self._clock, partial(self.rest, why="evicted"))) as room:
                await self._places.take(room.make)
            slot.has_place = True

    def _give_back(self, slot: Slot) -> None:
        if slot.has_place:
            slot.has_place = False
            self._places.give_back()

    def _mind(self, slot: Slot, engine: RunningEngine) -> None:
        task = asyncio.create_task(self._minded(slot, engine))
        self._minding.add(task)
        task.add_done_callback(self._minding.discard)

    async def _minded(self, slot: Slot, engine: RunningEngine) -> None:
        """Notice at once when the engine ends, asleep or awake, and let it rest when it was idle for long enough."""
        ended = asyncio.ensure_future(engine.ended())
        try:
            while slot.runs(engine):
                await self._until_due(slot, ended)
                if ended.done() and slot.runs(engine):
                    await self.lost(slot, ended.result())
        finally:
            ended.cancel()

    async def _until_due(self, slot: Slot, ended: asyncio.Future[str]) -> None:
        left = slot.idle_left_seconds()
        if slot.is_parked:
            await _unless(ended, slot.awake.wait())
        elif left is None:
            await asyncio.wait([ended])
        elif left <= 0:
            await _unless(ended, self.rest(slot, "idle"))
        else:
            await self._clock.wait(ended, left)

    async def lost(self, slot: Slot, how: str) -> None:
        """The engine ended by itself, or is as good as dead: clear up, and wait longer before the next start."""
        slot.died()
        await self.stop(slot, how, kind="died")

    async def rest(self, slot: Slot, why: str) -> None:
        """Park an engine that nobody uses, or stop it where it cannot be parked; return once its place is free.

        Whoever leases it before it goes keeps it.
        """
        engine = slot.sleeper
        refusal = await self._parking.refusal(slot) if engine is not None and slot.may_make_room else None
        if slot.may_make_room and slot.sleeper is engine:
            if engine is None:
                await self.stop(slot, why)
            elif refusal is not None:
                await self.stop(slot, f"{why}, not parked: {refusal}")
            else:
                slot.lies_down(engine)
                slot.parking = asyncio.create_task(self._park(slot, engine, why))
        if under_way := [task for task in (slot.parking, slot.stopping) if task is not None]:
            await asyncio.wait(under_way)

    async def _park(self, slot: Slot, engine: Sleeps, why: str) -> None:
        began = self._clock.monotonic()
        try:
            fault = await self._parking.put_to_sleep(engine)
        finally:
            slot.parking = None
        if fault is not None:
            await self._end_for(slot, fault, f"{why}, not parked: {fault}", "stopped")
            return
        slot.has_copy = True
        slot.enter("parked")
        self._give_back(slot)
        self._parking.watch()
        self._tell("parked", slot, seconds=self._clock.monotonic() - began, detail=why)

    async def _end_for(self, slot: Slot, fault: EngineFailed, why: str, kind: EventKind) -> None:
        """End an engine that did not go to sleep, or did not wake."""
        if isinstance(fault, EngineDead):
            await self.lost(slot, str(fault).rstrip("."))
        else:
            await self.stop(slot, why.rstrip("."), kind)

    async def stop(self, slot: Slot, why: str, kind: EventKind = "stopped") -> None:
        """Stop the engine if it runs, asleep or awake, and return once it ended."""
        engine = slot.is_over()
        if engine is not None:
            if slot.starting is None:  # else it goes on, without what it wanted to wake
                slot.enter("cold")
            slot.goes_on()
            parking, slot.parking = slot.parking, None
            if parking is not None:
                parking.cancel()
            slot.stopping = asyncio.create_task(self._end(slot, engine, parking))
            self._tell(kind, slot, detail=why)
        if slot.stopping is not None:
            await asyncio.wait([slot.stopping])

    async def _end(self, slot: Slot, engine: RunningEngine, parking: asyncio.Task[None] | None) -> None:
        try:
            if parking is not None:
                await asyncio.wait([parking])
            await engine.stop()
        finally:
            slot.stopping = None
            self._give_back(slot)

    def _tell(self, kind: EventKind, slot: Slot, *, seconds: float | None = None, detail: str = "") -> None:
        self._on_event(EngineEvent(kind, slot.model.id, slot.role, slot.state, seconds, detail))


async def _unless(ended: asyncio.Future[str], doing: Coroutine[Any, Any, Any]) -> None:
    """Do something, and leave it where the engine ends meanwhile."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait([ended, task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
    if task.done() and not task.cancelled():
        task.result()
