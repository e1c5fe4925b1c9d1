"""Engines that sleep and wake on a clock moved by hand, on a machine whose memory a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from streamtap.errors import EngineFailed
from streamtap.server.config import ModelConfig, Role, ServerConfig
from streamtap.server.pool.endpoint import Endpoint, Enter
from streamtap.server.pool.engine_events import EngineEvent
from streamtap.server.pool.host_memory import Memory
from streamtap.server.pool.pool import Pool
from streamtap.testing.fake_clock import FakeClock
from streamtap.testing.stub_launcher import Scene, StubLauncher, StubRun

#: Models whose engines can be parked, and are after 100 s.
SLEEPERS = tuple(
    ModelConfig(id=each, checkpoint="org/model", engine="vllm", park=True, idle_seconds=100) for each in "abc"
)


@dataclass
class SleepPlan:
    """How long engines take to fall asleep and to wake, and what keeps them from it."""

    sleep_seconds: float = 0.0
    wake_seconds: float = 0.0
    no_sleep: EngineFailed | None = None
    no_wake: EngineFailed | None = None


class SleepyRun(StubRun):
    """An engine that notes what it was told; its copy of the weights stays in the host's memory until it ends."""

    def __init__(self, endpoint: Endpoint, clock: FakeClock, plan: SleepPlan) -> None:
        super().__init__(endpoint)
        self.calls: list[str] = []
        self.has_copy = False
        self.is_asleep = False
        self._clock, self._plan = clock, plan

    async def sleep(self) -> None:
        """Fall asleep as planned."""
        self.calls.append("sleep")
        self.has_copy = self.is_asleep = True
        await self._clock.sleep(self._plan.sleep_seconds)
        if self._plan.no_sleep is not None:
            raise self._plan.no_sleep

    async def wake_up(self) -> None:
        """Wake as planned."""
        self.calls.append("wake")
        await self._clock.sleep(self._plan.wake_seconds)
        if self._plan.no_wake is not None:
            raise self._plan.no_wake
        self.is_asleep = False


@dataclass
class SleepyLauncher(StubLauncher):
    """Starts engines that sleep as ``plan`` says; ``runs`` are all that there were."""

    plan: SleepPlan = field(default_factory=SleepPlan)
    runs: list[SleepyRun] = field(default_factory=list)

    async def start(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> SleepyRun:
        """See ``Launches``."""
        started = await super().start(model, role, generation, enter)
        run = self.engines[-1] = SleepyRun(started.endpoint, self.clock, self.plan)
        self.runs.append(run)
        return run


class StubHost:
    """A machine with 1000 bytes: ``weights`` is what every model takes, ``used`` what others do; None is unknown.

    To look up the weights takes ``lookup_seconds``.
    """

    def __init__(self, launcher: SleepyLauncher) -> None:
        self.weights: int | None = 100
        self.used: int | None = 0
        self.lookup_seconds = 0.0
        self._launcher = launcher

    def memory(self) -> Memory | None:
        """What is left."""
        if self.used is None:
            return None
        copies = sum(run.has_copy and not run.end.done() for run in self._launcher.runs)
        return Memory(1000, 1000 - self.used - copies * (self.weights or 0))

    async def weights_bytes(self, model: ModelConfig) -> int | None:
        """The same for every model."""
        await self._launcher.clock.sleep(self.lookup_seconds)
        return self.weights


@dataclass
class Night(Scene):
    """A scene whose engines sleep."""

    launcher: SleepyLauncher
    host: StubHost

    def stage(self, model_id: str = "a") -> str:
        """Where its engine for completions stands."""
        return str(self.pool.boot(model_id, "completions")["stage"])

    async def use(self, model_id: str = "a") -> Endpoint:
        """Lease an engine for a moment, in which it has to be awake."""
        async with self.pool.lease(model_id, "completions") as endpoint:
            (run,) = (run for run in self.launcher.runs if run.endpoint is endpoint)
            if run.is_asleep or run.end.done():
                raise AssertionError("an engine was leased that sleeps, or has ended")
            self.pool.succeeded(endpoint)
            return endpoint

    async def sleep(self, *ids: str) -> None:
        """Use engines one second after the other, and leave them alone until they sleep."""
        for model_id in ids or ("a",):
            await self.use(model_id)
            await self.clock.advance(1)
        await self.clock.advance(100)


def play_night(
    part: Callable[[Night], Awaitable[None]],
    *models: ModelConfig,
    listen: Callable[[EngineEvent], None] = lambda _event: None,
    **config: Any,
) -> None:
    """Run ``part`` with ``models``, by default ``SLEEPERS``; afterwards no engine may be left, and nobody may wait."""

    async def main() -> None:
        clock = FakeClock()
        launcher = SleepyLauncher(clock)
        host = StubHost(launcher)
        events: list[EngineEvent] = []

        def heard(event: EngineEvent) -> None:
            events.append(event)
            listen(event)

        served = ServerConfig(models=models or SLEEPERS, **config)
        pool = Pool(served, clock=clock, on_event=heard, launcher=launcher, host=host)
        await part(Night(clock, launcher, pool, events, host))
        await pool.close()
        if launcher.running or clock.sleepers:
            raise AssertionError(f"left: {launcher.running}, and {clock.sleepers} that wait")

    asyncio.run(asyncio.wait_for(main(), 20))
