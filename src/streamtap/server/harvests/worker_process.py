"""One worker process under its keeper, which ends it should the gateway be gone."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from streamtap.server.clock import Clock
from streamtap.server.harvests.jobs import Lane
from streamtap.server.pool.engine_log import EngineLog
from streamtap.server.pool.engine_process import end_kept, kept_process

COMMAND = (sys.executable, "-m", "streamtap.server.harvests.worker")


class WorkerProcess:
    """A worker that was started."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        self.name = name
        self._process = process
        self._grace_seconds = grace_seconds
        self.exit = asyncio.ensure_future(process.wait())

    @classmethod
    async def spawn(
        cls,
        lane: Lane,
        orders: Path,
        *,
        log: EngineLog,
        clock: Clock,
        grace_seconds: float,
        command: Sequence[str] = COMMAND,
    ) -> WorkerProcess:
        """Start a worker of that lane; from SIGTERM to SIGKILL it has ``grace_seconds``.

        Raises:
            OSError: it cannot be started.
        """
        name = uuid.uuid4().hex
        words = [*command, "--orders", str(orders), "--name", name, "--lane", lane]
        with log.open(clock.now(), f"harvest worker {name} of {lane} models") as file:
            process = await kept_process(words, file, {}, grace_seconds)
        return cls(name, process, grace_seconds)

    async def stop(self) -> None:
        """End it, by force where it does not end by itself."""
        await end_kept(self._process, self.exit, self._grace_seconds)
