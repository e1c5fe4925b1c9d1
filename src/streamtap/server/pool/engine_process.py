"""One engine process under its keeper, which ends it should the gateway be gone."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Sequence
from typing import BinaryIO

from streamtap.errors import EngineDead, EngineFailed, EngineUnreachable
from streamtap.server.clock import Clock
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.pool.engine_health import HealthCheck
from streamtap.server.pool.engine_log import EngineLog
from streamtap.server.pool.sleep_mode import fall_asleep, wake_up
from streamtap.settings import BESIDE_OTHER_WORK, child_environment

_LOG_LOOK_SECONDS = 60.0
#: From the keeper's last resort to ours; and how long a process that broke a connection may take to be seen ended.
_MARGIN_SECONDS = 3.0
_ENDING_SECONDS = 0.5


class EngineProcess:
    """A process that was started; a ``RunningEngine`` once it answered."""

    def __init__(
        self,
        endpoint: Endpoint,
        process: asyncio.subprocess.Process,
        log: EngineLog,
        clock: Clock,
        grace_seconds: float,
    ) -> None:
        self._endpoint = endpoint
        self._process = process
        self._log = log
        self._clock = clock
        self._grace_seconds = grace_seconds
        self.health = HealthCheck(endpoint)
        self.exit = asyncio.ensure_future(process.wait())

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        variables: dict[str, str],
        endpoint: Endpoint,
        *,
        log: EngineLog,
        clock: Clock,
        grace_seconds: float,
    ) -> EngineProcess:
        """Start ``command``; from SIGTERM to SIGKILL it has ``grace_seconds``."""
        what = f"engine of {endpoint.model_id} for {endpoint.role}, start {endpoint.generation}"
        with log.open(clock.now(), what) as file:
            process = await kept_process(command, file, variables, grace_seconds)
        return cls(endpoint, process, log, clock, grace_seconds)

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        return self._endpoint

    async def ended(self) -> str:
        """Return once it ended: how, in words. Sees to the log meanwhile."""
        while not await self._clock.wait(self.exit, _LOG_LOOK_SECONDS):
            await asyncio.to_thread(self._log.rotate)
        return how_it_ended(self.exit.result())

    async def answers(self) -> bool:
        """Whether it still runs and answers."""
        await asyncio.wait([self.exit], timeout=_ENDING_SECONDS)
        return not self.exit.done() and (await self.health.ask()).ready

    async def sleep(self) -> None:
        """Return once its weights lie in the host's memory, where it is vLLM's server and has sleep mode.

        Raises:
            EngineFailed: it cannot, or did not answer; ``EngineDead`` where it ended.
        """
        await self._unless_it_ends(fall_asleep(self._endpoint))

    async def wake_up(self) -> None:
        """Return once it is awake and well.

        Raises:
            EngineFailed: it cannot, or did not answer; ``EngineDead`` where it ended.
        """
        await self._unless_it_ends(wake_up(self._endpoint))
        if not (await self.health.ask()).ready:
            raise EngineFailed("it is awake and says that it is not well.")

    async def _unless_it_ends(self, asking: Awaitable[None]) -> None:
        try:
            await asking
        except EngineUnreachable as error:
            await asyncio.wait([self.exit], timeout=_ENDING_SECONDS)
            if self.exit.done():
                raise EngineDead(f"{how_it_ended(self.exit.result())}.") from error
            raise

    async def stop(self) -> None:
        """End it and all that it started, by force where it does not end by itself."""
        await self.health.close()
        await end_kept(self._process, self.exit, self._grace_seconds)


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    return f"it was ended by signal {status - 128}" if status > 128 else f"it ended with status {status}"


async def kept_process(
    command: Sequence[str], log: BinaryIO, variables: dict[str, str], grace_seconds: float
) -> asyncio.subprocess.Process:
    """Start ``command`` under a keeper, whose stdin ends it when it is closed; it gets ``variables`` beside ours.

    Raises:
        OSError: it cannot be started.
    """
    keeper = [sys.executable, "-m", "streamtap.engines.keeper", "--grace-seconds", str(grace_seconds), "--"]
    return await asyncio.create_subprocess_exec(
        *keeper,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=child_environment(BESIDE_OTHER_WORK, **variables),
        start_new_session=True,  # Ctrl-C in the gateway's terminal is for the gateway, which ends the engines itself
    )


async def end_kept(process: asyncio.subprocess.Process, ended: asyncio.Future[int], grace_seconds: float) -> None:
    """End what ``kept_process`` started, by force where it does not end by itself; ``ended`` is done when it is."""
    if process.stdin is not None:
        process.stdin.close()  # which the keeper takes as its word
    await asyncio.wait([ended], timeout=grace_seconds + _MARGIN_SECONDS)
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await ended
