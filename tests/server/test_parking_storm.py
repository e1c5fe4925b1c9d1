"""Leases, cancellations, deaths and refusals in any order: who waits is served, and no place is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from streamtap.errors import EngineDead, EngineFailed, StreamtapError
from streamtap.testing.sleepy_launcher import Night, play_night

#: What may keep an engine from sleeping or waking.
FAULTS = (None, None, EngineFailed("it answers 500."), EngineDead("it was ended by signal 11."))


class _Storm:
    """One night of chance, the same for the same seed."""

    def __init__(self, night: Night, chance: random.Random) -> None:
        self.night, self.chance = night, chance
        self.users: list[asyncio.Future[None]] = []
        self.served = 0
        night.launcher.plan.sleep_seconds = chance.choice([0, 1, 5, 20])
        night.launcher.plan.wake_seconds = chance.choice([0, 1, 5])
        night.launcher.seconds = chance.choice([0, 3, 15])
        night.host.lookup_seconds = chance.choice([0, 0, 2])

    async def user(self, model_id: str) -> None:
        """Hold an engine for a while, in which it must not be put to sleep."""
        try:
            async with self.night.pool.lease(model_id, "completions") as endpoint:
                (run,) = (run for run in self.night.launcher.runs if run.endpoint is endpoint)
                for _ in range(self.chance.randint(0, 3)):
                    assert not run.is_asleep
                    await self.night.clock.sleep(self.chance.choice([0, 1, 7]))
                assert not run.is_asleep
                self.served += 1
        except StreamtapError:
            return

    async def blow(self) -> None:
        """A few users, some time, and now and then something that goes wrong."""
        chance, night = self.chance, self.night
        self.users += [asyncio.ensure_future(self.user(chance.choice("abc"))) for _ in range(chance.randint(0, 3))]
        await night.clock.advance(chance.choice([0, 0.5, 3, 11, 30, 101]))
        what = chance.randrange(24)
        if what == 0 and night.launcher.runs:
            chance.choice(night.launcher.runs).kill()
        elif what == 1 and self.users:
            chance.choice(self.users).cancel()
        elif what == 2:
            night.host.used = chance.choice([0, 500, 700, 850, 970])
        elif what == 3:
            night.launcher.plan.no_sleep = chance.choice(FAULTS)
        elif what == 4:
            night.launcher.plan.no_wake = chance.choice(FAULTS)
        elif what == 5:
            night.launcher.failures = 1

    async def settle(self) -> None:
        """Nothing goes wrong any more, and nobody comes."""
        plan = self.night.launcher.plan
        plan.no_sleep = plan.no_wake = None
        self.night.launcher.failures = self.night.host.used = 0
        await self.night.clock.advance(1000)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nobody_waits_for_ever_and_no_place_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    n_places = chance.choice([1, 1, 2, 3])

    async def part(night: Night) -> None:
        storm = _Storm(night, chance)
        for _ in range(50):
            await storm.blow()
        await storm.settle()
        assert all(user.done() for user in storm.users)
        assert [user.exception() for user in storm.users if not user.cancelled() and user.exception()] == []
        assert storm.served > len(storm.users) / 2
        assert {night.stage(model_id) for model_id in "abc"} <= {"cold", "parked", "failed"}
        async with AsyncExitStack() as held:
            for model_id in "abc"[:n_places]:
                asking = asyncio.ensure_future(held.enter_async_context(night.pool.lease(model_id, "completions")))
                await night.clock.advance(100)
                assert asking.done()

    play_night(part, max_engines=n_places)
