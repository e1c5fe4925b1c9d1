"""Starts what a model's table names, and waits until it answers."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from streamtap.engines.commands import engine_environment
from streamtap.errors import EngineDead, EngineFailed, EngineUnreachable
from streamtap.server.clock import Clock
from streamtap.server.config import ModelConfig, Role, ServerConfig
from streamtap.server.pool.command_line import command_of
from streamtap.server.pool.endpoint import Endpoint, Enter, RunningEngine
from streamtap.server.pool.engine_health import HealthCheck
from streamtap.server.pool.engine_log import EngineLog
from streamtap.server.pool.engine_process import EngineProcess, how_it_ended
from streamtap.server.pool.ports import HOST, free_port, is_taken
from streamtap.server.pool.remote_engine import RemoteEngine
from streamtap.server.pool.self_checking import SelfChecking

_PORT_TRIES = 3
#: Between two looks, more often at first. To wait for a process is not the clock's: moving one starts nothing.
_LOOK_SECONDS = (0.05, 0.25)
_OFTEN_LOOKS = 60
_MOST_GRACE_SECONDS = 10.0


class Launcher:
    """Starts engines of one configuration."""

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._checking = SelfChecking(config, clock)

    async def start(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> RunningEngine:
        """Start an engine and wait until it answers; nothing is left of one whose start failed or was cancelled.

        Raises:
            EngineFailed: it could not be started; the message has the last stage.
        """
        if model.engine == "url":
            return await self._reached(model, role, generation, enter)
        for _ in range(_PORT_TRIES):
            engine = await self._process(model, role, generation, enter)
            if engine is not None:
                return engine
        raise EngineFailed(
            f"{named(model, role)} could not be started: another program answered at its port, or it refuses the key "
            "that it was given; its log says more."
        )

    async def _process(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> EngineProcess | None:
        """A process that answers, or None if another program took its port."""
        port, key = free_port(), secrets.token_urlsafe(32)
        endpoint = Endpoint(
            f"http://{HOST}:{port}", {"Authorization": f"Bearer {key}"}, model.served_name, model.id, role, generation
        )
        until = self._clock.monotonic() + self._config.timing.start_seconds
        enter("starting", "Starting the engine's process")
        stages = _Stages(enter)
        process = await self._spawned(command_of(model, port, role), endpoint, key, parks=model.park)
        try:
            if not await self._until_ready(process, stages, named(model, role)):
                await process.stop()
                return None
            await self._checking.check(model, endpoint, enter, name=named(model, role), until=until)
        except BaseException:
            await process.stop()
            raise
        return process

    async def _spawned(self, command: list[str], endpoint: Endpoint, key: str, *, parks: bool) -> EngineProcess:
        try:
            return await EngineProcess.spawn(
                command,
                engine_environment(key, captures=endpoint.role == "activations", parks=parks),
                endpoint,
                log=EngineLog(log_path(self._config, endpoint.model_id, endpoint.role)),
                clock=self._clock,
                grace_seconds=max(0.1, min(_MOST_GRACE_SECONDS, self._config.timing.stop_seconds - 1)),
            )
        except OSError as error:
            raise EngineFailed(
                f"the engine of {endpoint.model_id!r} for {endpoint.role} could not be started: {error.strerror}."
            ) from error

    async def _until_ready(self, process: EngineProcess, stages: _Stages, name: str) -> bool:
        """Whether it answers; False if someone else does at its port.

        Raises:
            EngineDead: it ended, or said that it will not be ready.
            EngineUnreachable: it was not ready in time.
        """
        deadline = self._clock.monotonic() + self._config.timing.start_seconds
        looks = 0
        while not process.exit.done():
            health = await process.health.ask()
            if health.ready:
                return await process.health.takes_our_key()
            stages.saw(health.stage, health.label)
            if health.failed:
                raise EngineDead(f'{name} could not be started: it failed at "{stages.label}"; its log says why.')
            if self._clock.monotonic() >= deadline:
                raise EngineUnreachable(f'{name} was not ready in time: it still stands at "{stages.label}".')
            looks += 1
            await asyncio.wait([process.exit], timeout=_LOOK_SECONDS[looks > _OFTEN_LOOKS])
        if is_taken(int(process.endpoint.base_url.rpartition(":")[2])):
            return False
        how = how_it_ended(process.exit.result())
        raise EngineDead(f'{name} could not be started: {how} at "{stages.label}"; its log says why.')

    async def _reached(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> RemoteEngine:
        headers = _headers(model, role)
        base = address_of(model, role).rstrip("/").removesuffix("/v1")
        engine = RemoteEngine(Endpoint(base, headers, model.served_name, model.id, role, generation))
        until = self._clock.monotonic() + self._config.timing.start_seconds
        enter("connecting", "Connecting to the engine")
        try:
            await self._until_reached(engine.health, _Stages(enter), named(model, role))
            await self._checking.check(model, engine.endpoint, enter, name=named(model, role), until=until)
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _until_reached(self, check: HealthCheck, stages: _Stages, name: str) -> None:
        deadline = self._clock.monotonic() + self._config.timing.start_seconds
        while not (health := await check.ask()).ready:
            stages.saw(health.stage, health.label)
            if not health.reached:
                raise EngineUnreachable(f"{name} does not answer at its address; send the request again later.")
            if health.failed or self._clock.monotonic() >= deadline:
                raise EngineUnreachable(f'{name} is not ready: it stands at "{stages.label}".')
            await asyncio.sleep(_LOOK_SECONDS[-1])
        if not await check.takes_our_key():
            raise EngineFailed(f"{name} refuses the key of this service; its configuration is to be mended.")


class _Stages:
    """Passes stages on as they change, and remembers the last one's label."""

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self._stage = ""
        self.label = "Starting the engine's process"

    def saw(self, stage: str | None, label: str | None) -> None:
        if stage is not None and stage != self._stage:
            self._stage, self.label = stage, label or stage
            self._enter(stage, self.label)


def named(model: ModelConfig, role: Role) -> str:
    """An engine in messages."""
    return f"the engine of {model.id!r} for {role}"


def address_of(model: ModelConfig, role: Role) -> str:
    """Where an engine that runs elsewhere answers."""
    return (role == "activations" and model.activations_url) or model.url or ""


def log_path(config: ServerConfig, model_id: str, role: Role) -> Path:
    """Where an engine process writes what it has to say."""
    return config.data_dir / "logs" / f"{model_id}-{role}.log"


def _headers(model: ModelConfig, role: Role) -> dict[str, str]:
    if model.api_key_file is None:
        return {}
    try:
        key = model.api_key_file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise EngineFailed(f"{named(model, role)}: the file of its key cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isprintable():
        # Not with its cause, which quotes the file.
        raise EngineFailed(f"{named(model, role)}: the file of its key holds no key in one line of ASCII.") from None
    return {"Authorization": f"Bearer {key}"}
