"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

#: How often the event loop turns after each step, so that what was waiting can go as far as it can without time.
_TURNS = 20


class FakeClock:
    """Stands at ``start`` until ``advance`` moves it; whoever sleeps wakes in order of time.

    As a ``server.clock.Clock`` it serves every part of the service that waits.
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start or datetime(2026, 1, 15, 12, 0, tzinfo=UTC)
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    @property
    def sleepers(self) -> int:
        """How many are asleep now."""
        return sum(not waker.done() for _, waker in self._sleepers)

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        """Seconds that the clock was moved so far."""
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was moved by ``seconds``."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._elapsed + seconds, waker))
        try:
            await waker
        finally:
            self._sleepers = [each for each in self._sleepers if each[1] is not waker]

    async def wait(self, future: asyncio.Future[Any], timeout_seconds: float) -> bool:
        """Whether ``future`` is done before the clock was moved by ``timeout_seconds``; it is never cancelled."""
        timer = asyncio.ensure_future(self.sleep(timeout_seconds))
        try:
            await asyncio.wait([future, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        return future.done()

    async def advance(self, seconds: float) -> None:
        """Move the clock, stopping at each moment that somebody waits for."""
        target = self._elapsed + seconds
        await _turn()
        while due := [at for at, waker in self._sleepers if at <= target and not waker.done()]:
            self._elapsed = max(self._elapsed, min(due))
            for at, waker in self._sleepers:
                if at <= self._elapsed and not waker.done():
                    waker.set_result(None)
            await _turn()
        self._elapsed = target
        await _turn()

    def shift(self, seconds: float) -> None:
        """Move the clock where no event loop runs; sleepers wake at the next ``advance``."""
        self._elapsed += seconds


async def _turn() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
