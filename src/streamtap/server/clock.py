"""Time, passed in so that tests need not wait for it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any, Protocol


class Clock(Protocol):
    """What the service asks of time."""

    def now(self) -> datetime:
        """The time of day, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...

    async def wait(self, future: asyncio.Future[Any], timeout_seconds: float) -> bool:
        """Whether ``future`` is done within ``timeout_seconds``; it is never cancelled, its result not read."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        await asyncio.sleep(seconds)

    async def wait(self, future: asyncio.Future[Any], timeout_seconds: float) -> bool:
        """Whether ``future`` is done within ``timeout_seconds``; it is never cancelled, its result not read."""
        await asyncio.wait([future], timeout=timeout_seconds)
        return future.done()
