"""Holds an engine that just answered against the float32 reference, in a process of its own: a gateway has no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from streamtap.errors import EngineFailed
from streamtap.server.clock import Clock
from streamtap.server.config import ModelConfig, ServerConfig
from streamtap.server.pool.endpoint import Endpoint, Enter
from streamtap.server.pool.engine_log import EngineLog
from streamtap.server.pool.engine_process import end_kept, kept_process

STAGE, LABEL = "self_checking", "Comparing with the reference"

#: How ``streamtap doctor`` begins the line that says why it refuses an engine.
_REFUSED = "refused: "
_GRACE_SECONDS = 1.0
#: Requests of other engines go first.
_NICENESS = 10


class SelfChecking:
    """Checks the engines of one configuration."""

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    async def check(self, model: ModelConfig, endpoint: Endpoint, enter: Enter, *, name: str, until: float) -> None:
        """Return where the engine's rows are the model's, or nobody asked for a check; ``until`` is the clock's time.

        Raises:
            EngineFailed: they are not, which layer and why; or it could not be found out in time.
        """
        if not model.self_check or endpoint.role != "activations":
            return
        enter(STAGE, LABEL)
        log = self._config.data_dir / "logs" / f"{model.id}-self-check.log"
        status, said = await self._run(_command(model, endpoint), endpoint, log, until)
        if status is None:
            raise EngineFailed(f'{name} was not ready in time: it still stands at "{LABEL}".')
        if status == 0:
            return
        if (fault := _fault(said)) is not None:
            raise EngineFailed(f"{name} was stopped, for its rows are not the model's: {fault}.")
        raise EngineFailed(f"{name} could not be compared with the float32 reference; {log.name} says why.")

    async def _run(self, command: list[str], endpoint: Endpoint, log: Path, until: float) -> tuple[int | None, str]:
        """How ``command`` ended, None where it did not in time, and what it said."""
        # Not on a command line, which others on the machine can see.
        key = endpoint.headers.get("Authorization", "").removeprefix("Bearer ")
        what = f"self-check of {endpoint.model_id}, start {endpoint.generation}"
        try:
            with EngineLog(log).open(self._clock.now(), what) as file:
                begins = os.fstat(file.fileno()).st_size
                process = await kept_process(command, file, {"STREAMTAP_WORKER_KEY": key}, _GRACE_SECONDS)
        except OSError as error:
            raise EngineFailed(
                f"the self-check of {endpoint.model_id!r} could not be started: {error.strerror}."
            ) from error
        ended = asyncio.ensure_future(process.wait())
        try:
            with contextlib.suppress(ProcessLookupError):  # it ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            await asyncio.wait([ended], timeout=max(0.0, until - self._clock.monotonic()))
            status = ended.result() if ended.done() else None
        finally:
            await end_kept(process, ended, _GRACE_SECONDS)
        return status, await asyncio.to_thread(_read_from, log, begins)


def _command(model: ModelConfig, endpoint: Endpoint) -> list[str]:
    options = {"engine": "url", "url": endpoint.base_url, "as": endpoint.model, "model": model.checkpoint}
    if model.revision is not None:
        options["revision"] = model.revision
    return [sys.executable, "-m", "streamtap", "doctor", *(f"--{name}={value}" for name, value in options.items())]


def _read_from(log: Path, begins: int) -> str:
    with log.open("rb") as file:
        file.seek(begins)
        return file.read().decode(errors="replace")


def _fault(said: str) -> str | None:
    """Why the engine is refused; None where the check itself failed."""
    told = [line for line in said.splitlines() if line.startswith(_REFUSED)]
    return told[-1].removeprefix(_REFUSED).strip().rstrip(".") if told else None
