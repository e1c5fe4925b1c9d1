from __future__ import annotations

import asyncio
from datetime import UTC, timedelta

from streamtap.server.clock import Clock, SystemClock
from streamtap.testing.fake_clock import FakeClock


def test_the_machines_clock_goes_forward_in_utc() -> None:
    async def main() -> None:
        clock: Clock = SystemClock()
        before = clock.monotonic()
        await clock.sleep(0.01)
        assert clock.monotonic() - before >= 0.009
        assert clock.now().tzinfo is UTC

    asyncio.run(main())


def test_waiting_does_not_cancel_what_is_waited_for() -> None:
    async def main() -> None:
        for clock in (SystemClock(), FakeClock()):
            task = asyncio.ensure_future(asyncio.Event().wait())
            waiting = asyncio.ensure_future(clock.wait(task, 0.01))
            if isinstance(clock, FakeClock):
                await clock.advance(0.01)
            assert await waiting is False
            assert not task.cancelled()
            task.cancel()
            assert await clock.wait(task, 10) is True

    asyncio.run(main())


def test_a_fake_clock_stands_still_until_it_is_moved() -> None:
    async def main() -> None:
        clock = FakeClock()
        start = clock.now()
        woken: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float, again: float = 0) -> None:
            await clock.sleep(seconds)
            woken.append((name, clock.monotonic()))
            if again:
                await sleeper(name, again)

        tasks = [asyncio.ensure_future(sleeper(*each)) for each in (("c", 3), ("a", 1, 1), ("b", 1.5))]
        await clock.advance(0.5)
        assert woken == []
        assert clock.sleepers == 3
        await clock.advance(2)
        assert woken == [("a", 1), ("b", 1.5), ("a", 2)]
        assert clock.now() - start == timedelta(seconds=2.5)
        await clock.advance(0.5)
        assert woken[-1] == ("c", 3)
        await asyncio.gather(*tasks)
        assert clock.sleepers == 0

    asyncio.run(main())


def test_a_cancelled_sleeper_is_forgotten() -> None:
    async def main() -> None:
        clock = FakeClock()
        task = asyncio.ensure_future(clock.sleep(5))
        await clock.advance(1)
        task.cancel()
        await clock.advance(10)
        assert task.cancelled()
        assert clock.sleepers == 0
        await clock.sleep(0)

    asyncio.run(main())
