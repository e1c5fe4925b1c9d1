"""Engines that are nothing but their states, and a pool that starts them on a clock moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from streamtap.errors import EngineDead
from streamtap.server.config import ModelConfig, Role, ServerConfig
from streamtap.server.pool.endpoint import Endpoint, Enter
from streamtap.server.pool.engine_events import EngineEvent
from streamtap.server.pool.pool import Pool
from streamtap.testing.fake_clock import FakeClock


class StubRun:
    """An engine that is nothing but its states."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.healthy = True
        self.stopped = False
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ended(self) -> str:
        """Return once it was stopped or killed."""
        return await self.end

    async def answers(self) -> bool:
        """Whether it is healthy and was not ended."""
        return self.healthy and not self.end.done()

    async def stop(self) -> None:
        """End it."""
        await asyncio.sleep(0)
        self.stopped = True
        self.kill("it was stopped")

    def kill(self, how: str = "it was ended by signal 9") -> None:
        """It ends by itself."""
        if not self.end.done():
            self.end.set_result(how)


@dataclass
class StubLauncher:
    """Engines that take ``seconds`` to start, and fail to while there are ``failures`` left."""

    clock: FakeClock
    seconds: float = 0.0
    failures: int = 0
    engines: list[StubRun] = field(default_factory=list)
    given_up: int = 0

    async def start(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> StubRun:
        """See ``Launches``."""
        enter("loading_weights", "Loading the weights")
        try:
            await self.clock.sleep(self.seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.failures:
            self.failures -= 1
            raise EngineDead("it could not be started: it failed at 'Loading the weights'.")
        engine = StubRun(Endpoint("http://x", {}, model.served_name, model.id, role, generation))
        self.engines.append(engine)
        return engine

    @property
    def running(self) -> list[tuple[str, str]]:
        """Model and role of each that was not ended."""
        return [(each.endpoint.model_id, each.endpoint.role) for each in self.engines if not each.end.done()]


@dataclass
class Scene:
    """A pool, what it runs on, and what it told."""

    clock: FakeClock
    launcher: StubLauncher
    pool: Pool
    events: list[EngineEvent]

    def told(self) -> list[str]:
        """The kinds of the events so far."""
        return [event.kind for event in self.events]


def play(
    part: Callable[[Scene], Awaitable[None]], *ids: str, launcher: dict[str, Any] | None = None, **config: Any
) -> None:
    """Run ``part`` with a pool of models ``ids``, which idle for 100 s; afterwards no engine may be left."""

    async def main() -> None:
        clock = FakeClock()
        stub = StubLauncher(clock, **(launcher or {}))
        events: list[EngineEvent] = []
        models = tuple(ModelConfig(id=each, checkpoint="org/model", idle_seconds=100) for each in ids or ("a",))
        pool = Pool(ServerConfig(models=models, **config), clock=clock, on_event=events.append, launcher=stub)
        await pool.start()
        await part(Scene(clock, stub, pool, events))
        await pool.close()
        assert stub.running == []

    asyncio.run(asyncio.wait_for(main(), 20))


async def use(pool: Pool, model_id: str = "a", role: Role = "completions") -> Endpoint:
    """Lease an engine for a moment."""
    async with pool.lease(model_id, role) as endpoint:
        pool.succeeded(endpoint)
        return endpoint
