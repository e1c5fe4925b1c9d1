"""An engine process from its start to its end: serve at once, load meanwhile, stop gracefully."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from streamtap.engines.worker.app import Worker, create_app
from streamtap.engines.worker.stages import Load, Loading

_LOG = logging.getLogger(__name__)
#: How long answers that are being sent may take once the engine is closed, in seconds.
_LAST_SECONDS = 5
_TICK_SECONDS = 0.05


@dataclass(frozen=True)
class ServingOptions:
    """Where an engine process answers and as what.

    ``key`` is what a bearer must present. ``grace_seconds`` is how long requests may run on once the process was told
    to stop, and ``failed_seconds`` how long it goes on saying why the model could not be loaded.
    """

    name: str
    port: int
    host: str = "127.0.0.1"
    key: str | None = field(default=None, repr=False)
    grace_seconds: float = 30.0
    failed_seconds: float = 3.0
    keepalive_seconds: float = 5.0


def serve(load: Load, options: ServingOptions) -> int:
    """Serve until SIGTERM or SIGINT, or until loading failed; the exit status of the process.

    ``load`` begins once the port answers, so that its stages can be seen.
    """
    loading = Loading()
    worker = Worker(loading, name=options.name, key=options.key, keepalive_seconds=options.keepalive_seconds)
    WorkerServer(worker, load, options).run()
    return 0 if loading.error is None else 1


def end_process(status: int) -> None:
    """End at once: a thread that still loads a model would be waited for, or torn down halfway."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


class WorkerServer(uvicorn.Server):
    """Uvicorn's server, with our own start and end; it may run outside the main thread, where no signal reaches it."""

    def __init__(self, worker: Worker, load: Load, options: ServingOptions) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(worker),
                host=options.host,
                port=options.port,
                loop="asyncio",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                # A gateway keeps its connections; one that closes just as a request comes would lose it.
                timeout_keep_alive=120,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._worker, self._load, self._options = worker, load, options
        self._stopping: asyncio.Task[None] | None = None
        self._is_hurried = False
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer, and only then begin to load."""
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._worker.loading.start(self._load, failed=lambda: self.stop_after(self._options.failed_seconds))

    def stop_after(self, seconds: float) -> None:
        """Begin to stop in ``seconds``; from any thread."""
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._begin_to_stop, seconds)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully at the first signal; the second ends the grace."""
        _LOG.info("told to stop by %s", signal.Signals(sig).name)
        self._is_hurried = self._worker.is_closing
        self._worker.is_closing = True
        self.stop_after(0.0)

    def _begin_to_stop(self, seconds: float) -> None:
        if self._stopping is None or (seconds == 0 and not self._is_hurried):
            self._stopping = asyncio.get_running_loop().create_task(self._stop(seconds))

    async def _stop(self, delay_seconds: float) -> None:
        """Let what runs finish within the grace, fail what is left, then end."""
        await asyncio.sleep(delay_seconds)
        self._worker.is_closing = True
        await self._until_idle(self._options.grace_seconds, hurried=lambda: self._is_hurried)
        if self._worker.live:
            _LOG.warning("%d requests were not done within the grace", self._worker.live)
        engine = self._worker.loading.engine
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(self._worker.completing.threads, engine.close)
            await self._until_idle(_LAST_SECONDS)
        self.should_exit = True

    async def _until_idle(self, most_seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + most_seconds
        while self._worker.live and loop.time() < end and not hurried():
            await asyncio.sleep(_TICK_SECONDS)
