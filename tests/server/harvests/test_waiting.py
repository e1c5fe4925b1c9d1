"""Who may wait for a job, for how long, and when it ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.waiting import MOST_IN_ALL, MOST_PER_KEY, Waiters, until_over
from streamtap.testing.fake_clock import FakeClock


def test_four_of_a_key_and_eight_in_all() -> None:
    waiters = Waiters()
    with ExitStack() as some:
        first = [some.enter_context(waiters.waiting(1)) for _ in range(MOST_PER_KEY + 1)]
        second = [some.enter_context(waiters.waiting(2)) for _ in range(MOST_PER_KEY + 1)]
        third = [some.enter_context(waiters.waiting(3)) for _ in range(2)]

        assert first == second == [True] * MOST_PER_KEY + [False]
        assert third == [False, False]
        assert MOST_IN_ALL == 2 * MOST_PER_KEY

    # One that was turned away took no place with it.
    with ExitStack() as others:
        assert all(others.enter_context(waiters.waiting(3)) for _ in range(MOST_PER_KEY))


@dataclass
class Ending:
    """A job that is over at a time."""

    clock: FakeClock
    at: float
    looks: int = 0

    async def __call__(self) -> Job:
        self.looks += 1
        return cast("Job", self)

    @property
    def is_over(self) -> bool:
        return self.clock.monotonic() >= self.at


def wait_for(at: float, seconds: float, **more: Any) -> tuple[float, bool, int]:
    """When the wait ended, whether the job was over then, and how often it was looked at."""

    async def main() -> tuple[float, bool, int]:
        clock = FakeClock()
        ending = Ending(clock, at)
        hurried = more.get("hurried", lambda _clock: False)
        waiting = asyncio.ensure_future(until_over(ending, seconds, clock, hurried=lambda: hurried(clock)))
        for _ in range(1000):
            if waiting.done():
                break
            await clock.advance(0.125)
        found = await waiting
        return clock.monotonic(), found.is_over, ending.looks

    return asyncio.run(main())


def test_the_wait_ends_soon_after_the_job() -> None:
    ended, is_over, _ = wait_for(10, 60)

    assert is_over
    assert 10 <= ended <= 10.5


def test_the_wait_ends_with_its_time() -> None:
    ended, is_over, looks = wait_for(99, 5)

    assert not is_over
    assert 5 <= ended <= 5.25
    assert looks <= 25


def test_a_job_that_is_over_is_looked_at_once() -> None:
    assert wait_for(0, 60)[1:] == (True, 1)


def test_nobody_waits_in_a_hurry() -> None:
    ended, is_over, _ = wait_for(99, 60, hurried=lambda clock: clock.monotonic() >= 3)

    assert not is_over
    assert 3 <= ended <= 3.5
