"""Runs engines: each start waits for its turn, each run is minded to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from streamtap.errors import EngineFailed, StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.pool.endpoint import Launches, RunningEngine
from streamtap.server.pool.engine_events import EngineEvent, EventKind, OnEvent
from streamtap.server.pool.making_room import MakingRoom
from streamtap.server.pool.places import Places
from streamtap.server.pool.slot import Slot


class Runs:
    """Starts and stops the engines of ``slots``, at most ``max_engines`` processes at a time."""

    def __init__(
        self, slots: Sequence[Slot], launcher: Launches, max_engines: int, clock: Clock, on_event: OnEvent
    ) -> None:
        self._slots = slots
        self._launcher = launcher
        self._clock = clock
        self._on_event = on_event
        self._places = Places(max_engines, clock)
        self._minding: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give up every start and stop every engine."""
        starting = [slot.starting for slot in self._slots if slot.starting is not None]
        for task in starting:
            task.cancel()
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
        """Start the engine; the error that kept it from starting, for everyone who waits.

        The task of it is to be ``slot.starting``.
        """
        slot.enter("starting")
        self._tell("starting", slot)
        try:
            await self._until_allowed(slot)
            began = self._clock.monotonic()
            slot.generation += 1
            engine = await self._launched(slot)
        except EngineFailed as error:
            slot.died()
            slot.enter("failed")
            self._tell("failed", slot, detail=str(error))
            return error
        except BaseException as error:
            slot.enter("cold")
            if isinstance(error, asyncio.CancelledError) and error.args:  # with a reason: it gave up by itself
                self._tell("stopped", slot, detail=str(error))
            raise
        finally:
            slot.starting = None
        slot.engine, slot.suspect = engine, False
        slot.ready_since = self._clock.monotonic()
        slot.enter("ready")
        slot.used()
        self._mind(slot, engine)
        self._tell("ready", slot, seconds=self._clock.monotonic() - began)
        return None

    async def _until_allowed(self, slot: Slot) -> None:
        """Wait for the engine's last run to be over, for the back-off, and for a place."""
        if slot.stopping is not None:
            await asyncio.wait([slot.stopping])
        if wait := slot.backoff_left_seconds():
            slot.enter("starting", "backing_off", "Waiting before the next start")
            await self._clock.sleep(wait)
        if slot.is_process:
            slot.enter("starting", "queued", "Waiting for another engine to stop")
            with closing(MakingRoom(slot, self._slots, self._clock, partial(self.stop, why="evicted"))) as room:
                await self._places.take(room.make)

    async def _launched(self, slot: Slot) -> RunningEngine:
        try:
            return await self._launcher.start(
                slot.model, slot.role, slot.generation, lambda stage, label: slot.enter("starting", stage, label)
            )
        except BaseException:
            self._give_back(slot)
            raise

    def _give_back(self, slot: Slot) -> None:
        if slot.is_process:
            self._places.give_back()

    def _mind(self, slot: Slot, engine: RunningEngine) -> None:
        task = asyncio.create_task(self._minded(slot, engine))
        self._minding.add(task)
        task.add_done_callback(self._minding.discard)

    async def _minded(self, slot: Slot, engine: RunningEngine) -> None:
        """Notice at once when the engine ends, and stop it when it was idle for long enough."""
        ended = asyncio.ensure_future(engine.ended())
        try:
            while slot.engine is engine:
                left = slot.idle_left_seconds()
                if left is None:
                    await asyncio.wait([ended])
                elif left <= 0:
                    await self.stop(slot, "idle")
                else:
                    await self._clock.wait(ended, left)
                if ended.done() and slot.engine is engine:
                    await self.lost(slot, ended.result())
        finally:
            ended.cancel()

    async def lost(self, slot: Slot, how: str) -> None:
        """The engine ended by itself, or is as good as dead: clear up, and wait longer before the next start."""
        slot.died()
        await self.stop(slot, how, kind="died")

    async def stop(self, slot: Slot, why: str, kind: EventKind = "stopped") -> None:
        """Stop the engine if it runs, and return once it ended."""
        engine, slot.engine = slot.engine, None
        if engine is not None:
            slot.enter("cold")
            slot.goes_on()
            slot.stopping = asyncio.create_task(self._end(slot, engine))
            self._tell(kind, slot, detail=why)
        if slot.stopping is not None:
            await asyncio.wait([slot.stopping])

    async def _end(self, slot: Slot, engine: RunningEngine) -> None:
        try:
            await engine.stop()
        finally:
            slot.stopping = None
            self._give_back(slot)

    def _tell(self, kind: EventKind, slot: Slot, *, seconds: float | None = None, detail: str = "") -> None:
        self._on_event(EngineEvent(kind, slot.model.id, slot.role, slot.state, seconds, detail))
