from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streamtap.errors import (
    CaptureInterrupted,
    CaptureMissed,
    CircuitOpen,
    EngineDead,
    EngineFailed,
    EngineUnreachable,
    InvalidInput,
    ServerRestarting,
    StreamtapError,
)
from streamtap.server.config import ModelConfig, ServerConfig
from streamtap.server.pool.pool import Pool
from streamtap.testing.fake_clock import FakeClock
from streamtap.testing.stub_launcher import Scene, StubLauncher, play, use


@contextmanager
def _refused(kind: type[StreamtapError], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match):
        yield


def test_many_leases_share_one_start() -> None:
    async def part(scene: Scene) -> None:
        users = [asyncio.ensure_future(use(scene.pool)) for _ in range(20)]
        await scene.clock.advance(29)
        assert not scene.pool.is_ready("a", "completions")
        assert scene.pool.boot("a", "completions") == {
            "warm": False,
            "stage": "loading_weights",
            "stage_label": "Loading the weights",
            "stage_age_s": 29,
        }
        await scene.clock.advance(1)
        endpoints = await asyncio.gather(*users)
        assert len(scene.launcher.engines) == 1
        assert set(map(id, endpoints)) == {id(scene.launcher.engines[0].endpoint)}
        assert scene.pool.boot("a", "completions")["warm"]
        assert scene.told() == ["starting", "ready"]
        assert scene.events[1].seconds == 30

    play(part, launcher={"seconds": 30})


def test_a_lease_that_is_cancelled_does_not_stop_the_start() -> None:
    async def part(scene: Scene) -> None:
        first, second = (asyncio.ensure_future(use(scene.pool)) for _ in range(2))
        await scene.clock.advance(1)
        for each in (first, second):
            each.cancel()
        await scene.clock.advance(9)
        assert first.cancelled()
        assert second.cancelled()
        assert scene.pool.is_ready("a", "completions")
        assert len(scene.launcher.engines) == 1

    play(part, launcher={"seconds": 10})


def test_roles_have_engines_of_their_own_unless_they_share() -> None:
    async def apart(scene: Scene) -> None:
        await use(scene.pool, role="completions")
        assert not scene.pool.is_ready("a", "activations")
        await use(scene.pool, role="activations")
        assert scene.launcher.running == [("a", "completions"), ("a", "activations")]

    async def together(scene: Scene) -> None:
        await use(scene.pool, role="completions")
        assert scene.pool.is_ready("a", "activations")
        await use(scene.pool, role="activations")
        assert scene.launcher.running == [("a", "activations")]
        assert [each["role"] for each in scene.pool.states()] == ["activations"]

    play(apart)
    play(together, engines="shared")


def test_an_engine_stops_when_it_was_idle_for_long_enough() -> None:
    async def part(scene: Scene) -> None:
        await use(scene.pool)
        await scene.clock.advance(99)
        await use(scene.pool)
        await scene.clock.advance(99)
        assert scene.pool.is_ready("a", "completions")
        async with scene.pool.lease("a", "completions"):
            await scene.clock.advance(1000)
            assert scene.pool.is_ready("a", "completions")
        await scene.clock.advance(99.5)
        assert scene.launcher.running == [("a", "completions")]
        await scene.clock.advance(0.5)
        assert scene.launcher.running == []
        assert scene.events[-1].detail == "idle"
        await use(scene.pool)
        assert len(scene.launcher.engines) == 2

    play(part)


def test_a_place_is_free_again_after_a_death_and_a_failed_start() -> None:
    async def part(scene: Scene) -> None:
        with _refused(EngineDead, "could not be started"):
            await use(scene.pool, "a")
        await use(scene.pool, "b")
        scene.launcher.engines[0].kill()
        await scene.clock.advance(0)
        await use(scene.pool, "c")
        assert scene.launcher.running == [("c", "completions")]

    play(part, "a", "b", "c", max_engines=1, launcher={"failures": 1})


def test_a_death_is_noticed_at_once_and_the_next_lease_starts_it_again() -> None:
    async def part(scene: Scene) -> None:
        await use(scene.pool)
        scene.launcher.engines[0].kill()
        await scene.clock.advance(0)
        assert not scene.pool.is_ready("a", "completions")
        assert scene.launcher.engines[0].stopped
        assert (scene.events[-1].kind, scene.events[-1].detail) == ("died", "it was ended by signal 9")
        user = asyncio.ensure_future(use(scene.pool))
        await scene.clock.advance(0.9)
        assert scene.pool.boot("a", "completions")["stage"] == "backing_off"
        await scene.clock.advance(0.1)
        assert (await user).generation == 2

    play(part)


def test_starts_that_fail_wait_longer_each_time_until_one_succeeds() -> None:
    async def part(scene: Scene) -> None:
        for wait in (0, 1, 2, 4, 8, 16, 32, 60, 60):
            user = asyncio.ensure_future(use(scene.pool))
            if wait:
                await scene.clock.advance(wait - 0.25)
                assert not user.done()
                await scene.clock.advance(0.25)
            with _refused(EngineDead, "failed at 'Loading the weights'"):
                await user
            assert scene.pool.states()[0]["state"] == "failed"
        scene.launcher.failures = 0
        await scene.clock.advance(60)
        await use(scene.pool)
        scene.launcher.engines[0].kill()
        await scene.clock.advance(1)
        await use(scene.pool)
        assert scene.clock.monotonic() < 300

    play(part, launcher={"failures": 9})


def test_everyone_who_waits_for_a_start_hears_that_it_failed() -> None:
    async def part(scene: Scene) -> None:
        users = [asyncio.ensure_future(use(scene.pool)) for _ in range(3)]
        await scene.clock.advance(5)
        errors = await asyncio.gather(*users, return_exceptions=True)
        assert [type(each) for each in errors] == [EngineDead] * 3
        assert len(set(map(id, errors))) == 3
        assert scene.told() == ["starting", "failed"]

    play(part, launcher={"failures": 1, "seconds": 5})


def test_an_engine_that_lost_a_connection_is_looked_at_before_it_is_leased_again() -> None:
    async def part(scene: Scene) -> None:
        endpoint = await use(scene.pool)
        scene.pool.failed(endpoint, EngineDead("gone"))
        assert await use(scene.pool) == endpoint
        scene.launcher.engines[0].healthy = False
        scene.pool.failed(endpoint, EngineDead("gone"))
        user = asyncio.ensure_future(use(scene.pool))
        await scene.clock.advance(1)
        assert (await user).generation == 2
        assert scene.launcher.engines[0].stopped

    play(part)


def test_five_failures_in_a_row_open_the_breaker() -> None:
    async def part(scene: Scene) -> None:
        endpoint = await use(scene.pool)
        interrupted = CaptureInterrupted("no", layer=3)
        for error in [InvalidInput("no"), ServerRestarting("no"), interrupted, asyncio.CancelledError()] * 5:
            scene.pool.failed(endpoint, error)
        for _ in range(4):
            scene.pool.failed(endpoint, EngineFailed("no"))
        await use(scene.pool)
        for error in [EngineFailed("no"), CaptureMissed("no", layer=3)] * 2:
            scene.pool.failed(endpoint, error)
        await use(scene.pool, role="activations")
        scene.pool.failed(endpoint, EngineFailed("no"))
        with _refused(CircuitOpen, "the engine of 'a' for completions failed 5 times"):
            await use(scene.pool)
        await use(scene.pool, role="activations")
        await scene.clock.advance(60)
        await use(scene.pool)

    play(part)


def test_all_that_one_death_takes_down_counts_as_one_failure() -> None:
    async def part(scene: Scene) -> None:
        endpoint = await use(scene.pool)
        for _ in range(3):
            scene.pool.failed(endpoint, EngineDead("gone"))
        scene.launcher.engines[0].kill()
        await scene.clock.advance(1)
        for _ in range(16):
            scene.pool.failed(endpoint, EngineDead("gone"))
        assert (await use(scene.pool)).generation == 2

    play(part)


def test_an_engine_that_loses_every_connection_opens_the_breaker() -> None:
    async def part(scene: Scene) -> None:
        for _ in range(5):
            async with scene.pool.lease("a", "completions") as endpoint:
                scene.pool.failed(endpoint, EngineDead("gone"))
        with _refused(CircuitOpen, "5 times"):
            await use(scene.pool)

    play(part)


def test_an_engine_that_hangs_on_every_request_opens_the_breaker_though_it_says_it_is_well() -> None:
    async def part(scene: Scene) -> None:
        for _ in range(5):
            async with scene.pool.lease("a", "completions") as endpoint:
                scene.pool.failed(endpoint, EngineUnreachable("late"))
        with _refused(CircuitOpen, "5 times"):
            await use(scene.pool)

    play(part)


def test_closing_stops_all_and_refuses_who_waits() -> None:
    async def part(scene: Scene) -> None:
        await use(scene.pool, "a")
        scene.launcher.seconds = 10
        waiting = asyncio.ensure_future(use(scene.pool, "b"))
        await scene.clock.advance(1)
        await scene.pool.close()
        with _refused(ServerRestarting, "restarting"):
            await waiting
        with _refused(ServerRestarting, "restarting") as _:
            await use(scene.pool, "a")
        assert scene.launcher.given_up == 1
        assert scene.launcher.running == []
        assert scene.events[-1].detail == "closing"

    play(part, "a", "b")


def test_remote_engines_take_no_place_and_never_idle() -> None:
    async def main() -> None:
        clock = FakeClock()
        stub = StubLauncher(clock)
        remote = [ModelConfig(id=each, checkpoint="o/m", engine="url", url="http://h", idle_seconds=5) for each in "ab"]
        pool = Pool(ServerConfig(models=tuple(remote), max_engines=1), clock=clock, launcher=stub)
        await use(pool, "a")
        await use(pool, "b")
        await clock.advance(1000)
        assert len(stub.running) == 2
        await pool.close()
        assert clock.sleepers == 0

    asyncio.run(asyncio.wait_for(main(), 20))
