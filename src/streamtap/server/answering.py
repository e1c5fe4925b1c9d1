"""Work that may take minutes, behind a connection that must not fall silent: section 6 of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamtap.errors import ColdStart, StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.config import Timing
from streamtap.server.stopping import Stopping
from streamtap.server.surface.reply import Reply

#: When a client may ask again, in seconds: after the deadline, and while an engine starts, which may take only a few.
_RETRY_SECONDS, _START_RETRY_SECONDS = 30, 5
#: How often a binary answer, which cannot be kept alive, is looked at while it waits, in seconds.
_LOOK_SECONDS = 1.0
_LONG_SECONDS = 3600.0
Stage = Literal["queued", "starting", "running"]


class Answering:
    """Runs the work of one request, keeps its client patient, and ends it when nobody waits for it any more.

    ``stage`` is what the request waits for: a slot of its key, its engine's start, or the engine's answer. Where the
    deadline ended it in the last of these, ``engine_was_late``.
    """

    def __init__(self, reply: Reply, *, started: float, clock: Clock, timing: Timing) -> None:
        self._reply = reply
        self._clock = clock
        self._timing = timing
        self._first_answer = started + timing.first_answer_seconds
        self._deadline = started + timing.deadline_seconds
        self._task: asyncio.Task[None] | None = None
        self._ended_by: Exception | None = None
        self.stage: Stage = "queued"
        self.engine_was_late = False

    async def run(self, work: Callable[[], Awaitable[None]], receive: Receive, stopping: Stopping) -> None:
        """Run ``work`` to its end.

        Raises:
            ClientDisconnect: the client left; the work was stopped.
            ColdStart: the deadline passed before an answer began.
            ServerRestarting: the server stops and could not wait any longer.
        """
        self._task = task = asyncio.ensure_future(_as_coroutine(work))
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            with stopping.interruptible(self.end):
                while not await self._clock.wait(task, self._patience()):
                    await self._be_patient()
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self._ended_by is not None and (task.cancelled() or task.exception() is not None):
            raise self._ended_by
        task.result()

    def end(self, error: Exception) -> None:
        """Stop the work, for this reason; the first reason holds."""
        if self._ended_by is None and self._task is not None and not self._task.done():
            self._ended_by = error
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # A server says the same once the last byte is out, while the work still lets go of its engine.
        if not self._reply.finished:
            self.end(ClientDisconnect())

    def _patience(self) -> float:
        now = self._clock.monotonic()
        if self._reply.kind == "binary" and not self._reply.begun and now >= self._first_answer:
            return _LOOK_SECONDS
        until = self._reply.silent_until()
        if self._reply.kind == "binary":
            until = min(until, self._first_answer)
        if not self._reply.has_data:
            until = min(until, self._deadline)
        return min(max(0.0, until - now), _LONG_SECONDS)

    async def _be_patient(self) -> None:
        now = self._clock.monotonic()
        if now >= self._deadline and not self._reply.has_data:
            self.engine_was_late = self.stage == "running"
            self.end(self._too_late())
        elif self._reply.kind == "binary" and self.stage == "starting" and now >= self._first_answer:
            why = "the model's engine is starting, and a binary answer cannot wait for it"
            self.end(_cold(why, _START_RETRY_SECONDS))
        elif now >= self._reply.silent_until():
            await self._reply.keep_alive()

    def _too_late(self) -> StreamtapError:
        what = "the model's engine did not answer" if self.stage == "running" else "the model's engine was not ready"
        return _cold(f"{what} within {self._timing.deadline_seconds:g} seconds", _RETRY_SECONDS)


def _cold(what: str, retry_seconds: int) -> ColdStart:
    error = ColdStart(f"{what}; send the request again in {retry_seconds} seconds.")
    error.retry_after_seconds = retry_seconds
    return error


async def _as_coroutine(work: Callable[[], Awaitable[None]]) -> None:
    await work()
