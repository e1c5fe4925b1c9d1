"""Clients that wait for a job to end: a few at a time, so that nobody holds all connections of a gateway."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from streamtap.errors import InvalidInput
from streamtap.server.clock import Clock
from streamtap.server.harvests.jobs import Job

MOST_PER_KEY = 4
MOST_IN_ALL = 8
MOST_SECONDS = 60
#: How often a job is looked at, in seconds; another process ends it.
_LOOK_SECONDS = 0.25
_SECONDS = re.compile(r"[0-9]{1,32}(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


def wait_seconds(told: str | None) -> float:
    """``wait`` of a query, 0 where there is none.

    Raises:
        InvalidInput: it is no number from 0 to 60.
    """
    if told is None:
        return 0.0
    if not _SECONDS.fullmatch(told) or float(told) > MOST_SECONDS:
        raise InvalidInput(f"wait must be a number of seconds from 0 to {MOST_SECONDS}.")
    return float(told)


class Waiters:
    """Who waits just now."""

    def __init__(self) -> None:
        self._of: Counter[int] = Counter()

    @contextmanager
    def waiting(self, key_id: int) -> Iterator[bool]:
        """Count a waiter of that key for the block; False where it or all have as many as may be."""
        free = self._of[key_id] < MOST_PER_KEY and self._of.total() < MOST_IN_ALL
        if free:
            self._of[key_id] += 1
        try:
            yield free
        finally:
            if free:
                self._of[key_id] -= 1
                # No entry for every key that ever waited.
                self._of += Counter()


async def until_over(
    look: Callable[[], Awaitable[Job]], seconds: float, clock: Clock, *, hurried: Callable[[], bool]
) -> Job:
    """The job once it is over, or as it is after ``seconds`` or when ``hurried`` says so."""
    end = clock.monotonic() + seconds
    while not (job := await look()).is_over and not hurried() and (left := end - clock.monotonic()) > 0:
        await clock.sleep(min(_LOOK_SECONDS, left))
    return job
