"""A server that is about to stop: takes nothing new, and lets what runs come to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streamtap.errors import ServerRestarting, StreamtapError
from streamtap.server.clock import Clock

#: When a client may look for the next server, in seconds.
_RETRY_SECONDS = 10
Interrupt = Callable[[StreamtapError], None]


class Stopping:
    """Knows what runs, and ends it when its time is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running = 0
        self._interrupts: set[Interrupt] = set()
        self._idle: asyncio.Future[None] | None = None
        self.begun = False

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._running

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    @contextmanager
    def interruptible(self, interrupt: Interrupt) -> Iterator[None]:
        """Let ``interrupt`` end a request that is still running when the time is over."""
        self._interrupts.add(interrupt)
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)

    def refusal(self) -> ServerRestarting:
        """What a request is told that comes too late."""
        error = ServerRestarting("the server is restarting; send the request again in a moment.")
        error.retry_after_seconds = _RETRY_SECONDS
        return error

    def waits_for(self, seconds: float) -> str | None:
        """What a person at the terminal is told who asked for the stop; None where nothing runs."""
        if not self._running:
            return None
        requests = "1 request" if self._running == 1 else f"{self._running} requests"
        return f"Waiting up to {seconds:g} s for {requests}; Ctrl-C again stops now."

    async def drain(self, seconds: float) -> None:
        """Take nothing new; return once all is answered, ending after ``seconds`` what has not ended by itself."""
        self.begun = True
        if not await self._idle_within(seconds):
            self.hurry()
            await self._idle_within(_RETRY_SECONDS)

    def hurry(self) -> None:
        """End what runs now."""
        for interrupt in list(self._interrupts):
            interrupt(self.refusal())

    async def _idle_within(self, seconds: float) -> bool:
        if not self._running:
            return True
        self._idle = asyncio.get_running_loop().create_future()
        return await self._clock.wait(self._idle, seconds)
