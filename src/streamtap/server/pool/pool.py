"""The engines of this gateway: started or woken when a request needs one, shared, at rest when idle, minded always."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streamtap.errors import (
    CaptureInterrupted,
    ColdStart,
    EngineDead,
    EngineUnreachable,
    InvalidInput,
    NotServing,
    ServerRestarting,
    StreamtapError,
    Unsupported,
)
from streamtap.server.clock import Clock, SystemClock
from streamtap.server.config import ModelConfig, Role, ServerConfig
from streamtap.server.pool.breaker import Breaker
from streamtap.server.pool.endpoint import Endpoint as Endpoint
from streamtap.server.pool.endpoint import Launches, RunningEngine
from streamtap.server.pool.engine_events import OnEvent, ignore_event
from streamtap.server.pool.host_memory import Host, LocalHost
from streamtap.server.pool.launching import Launcher, named
from streamtap.server.pool.runs import Runs
from streamtap.server.pool.slot import Slot

#: What says nothing of an engine's health: the caller's mistakes, a cold start, and an engine that is only busy.
_NOT_THE_ENGINES = (InvalidInput, Unsupported, NotServing, CaptureInterrupted)


class Pool:
    """Leases engines. Lives in one event loop.

    ``on_event`` is called with each ``EngineEvent`` and must not block. ``launcher`` starts engines, by default as
    processes or at their addresses. ``host`` tells how much memory there is to park engines in, by default this
    machine's.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
        on_event: OnEvent = ignore_event,
        launcher: Launches | None = None,
        host: Host | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._slots = {
            (model.id, role): self._slot(model, role) for model in config.models for role in config.roles(model)
        }
        self._runs = Runs(
            list(self._slots.values()),
            launcher or Launcher(config, self._clock),
            config.max_engines,
            self._clock,
            on_event,
            host or LocalHost(),
        )
        self._closing = False

    async def start(self) -> None:
        """Be ready to lease; no engine is started before it is needed."""

    async def close(self) -> None:
        """Stop every engine; who waits for one gets ``ServerRestarting``."""
        self._closing = True
        await self._runs.close()

    @asynccontextmanager
    async def lease(self, model_id: str, role: Role) -> AsyncIterator[Endpoint]:
        """An engine that is ready, started or woken if need be; it neither stops nor sleeps while it is leased.

        Raises:
            CircuitOpen: it failed too often just now.
            EngineDead: it could not be started; ``EngineUnreachable`` and ``EngineFailed`` alike.
            ServerRestarting: the pool is closing.
        """
        slot = self._of(model_id, role)
        self._refuse_when_closing()
        slot.breaker.check()
        slot.users += 1
        try:
            engine = await self._ready(slot)
            slot.holders += 1
            try:
                yield engine.endpoint
            finally:
                slot.holders -= 1
        finally:
            slot.users -= 1
            slot.used()
            if not slot.holders:
                self._runs.let_go()

    def succeeded(self, endpoint: Endpoint) -> None:
        """A request was answered whole."""
        slot = self._of(endpoint.model_id, endpoint.role)
        slot.breaker.succeeded()
        if endpoint.generation == slot.generation:
            slot.succeeded()

    def failed(self, endpoint: Endpoint, error: BaseException) -> None:
        """A request failed with ``error``, which counts against the engine unless it says nothing of its health."""
        if not isinstance(error, StreamtapError) or isinstance(error, _NOT_THE_ENGINES):
            return
        slot = self._of(endpoint.model_id, endpoint.role)
        if not isinstance(error, EngineDead | EngineUnreachable) or slot.is_lost_anew(endpoint.generation):
            slot.breaker.failed()

    def is_ready(self, model_id: str, role: Role) -> bool:
        """Whether a request would be served without waiting for a start."""
        return self._of(model_id, role).is_ready

    def boot(self, model_id: str, role: Role) -> dict[str, Any]:
        """How far the engine is: ``warm``, ``stage``, ``stage_label``, ``stage_age_s``."""
        return self._of(model_id, role).view()

    def states(self) -> list[dict[str, Any]]:
        """``model``, ``role``, ``state``, ``stage`` and ``stage_age_s`` of every engine."""
        views = ((slot, slot.view()) for slot in self._slots.values())
        return [
            {
                "model": slot.model.id,
                "role": slot.role,
                "state": slot.state,
                "stage": view["stage"],
                "stage_age_s": view["stage_age_s"],
            }
            for slot, view in views
        ]

    def _slot(self, model: ModelConfig, role: Role) -> Slot:
        limits = self._config.limits
        breaker = Breaker(
            named(model, role), self._clock, failures=limits.breaker_failures, seconds=limits.breaker_seconds
        )
        return Slot(model, role, self._clock, self._config.timing, breaker)

    def _of(self, model_id: str, role: Role) -> Slot:
        """The engine that serves ``role``; one for both serves either."""
        own = self._slots.get((model_id, role))
        if own is not None:
            return own
        return self._slots[model_id, "activations" if role == "completions" else "completions"]

    def _refuse_when_closing(self) -> None:
        if self._closing:
            error = ServerRestarting("the server is restarting; send the request again in a moment.")
            error.retry_after_seconds = 10
            raise error

    async def _ready(self, slot: Slot) -> RunningEngine:
        while True:
            self._refuse_when_closing()
            if slot.suspect:
                await self._look_at(slot)
            elif not slot.admits.is_set():
                await slot.admits.wait()
            elif slot.engine is not None:
                return slot.engine
            else:
                await self._until_started(slot)

    async def _look_at(self, slot: Slot) -> None:
        """After a broken connection: find out whether the engine is still there."""
        engine = slot.engine
        alive = engine is not None and await engine.answers()
        if slot.engine is engine:
            slot.suspect = False
            if engine is not None and not alive:
                await self._runs.lost(slot, "it does not answer")

    async def _until_started(self, slot: Slot) -> None:
        if slot.starting is None:
            slot.starting = asyncio.create_task(self._runs.start(slot))
        # Waiting so, a lease that is cancelled leaves the start to the others.
        await asyncio.wait([task := slot.starting])
        if task.cancelled():
            self._refuse_when_closing()
            raise ColdStart(f"the start of {named(slot.model, slot.role)} was given up; send the request again.")
        error = task.result()
        if error is not None:
            raise copy.copy(error)
