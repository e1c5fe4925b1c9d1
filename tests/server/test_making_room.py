"""Who gets a place when all are taken."""

from __future__ import annotations

import asyncio

from streamtap.testing.stub_launcher import Scene, play, use


def test_a_busy_engine_is_never_evicted() -> None:
    async def part(scene: Scene) -> None:
        async with scene.pool.lease("a", "completions"):
            waiting = [asyncio.ensure_future(use(scene.pool, model_id)) for model_id in ("b", "c")]
            await scene.clock.advance(60)
            assert scene.launcher.running == [("a", "completions")]
            assert scene.pool.boot("b", "completions")["stage"] == "queued"
        await asyncio.gather(*waiting)
        assert scene.launcher.running == [("c", "completions")]
        assert [each.endpoint.model_id for each in scene.launcher.engines] == ["a", "b", "c"]

    play(part, "a", "b", "c", max_engines=1)


def test_the_least_recently_used_makes_room() -> None:
    async def part(scene: Scene) -> None:
        for model_id in ("a", "b", "a", "c"):
            await scene.clock.advance(1)
            await use(scene.pool, model_id)
        assert scene.launcher.running == [("a", "completions"), ("c", "completions")]
        assert [event.model_id for event in scene.events if event.detail == "evicted"] == ["b"]

    play(part, "a", "b", "c", max_engines=2)


def test_an_engine_that_is_always_busy_yields_to_a_start_that_waited_long_enough() -> None:
    async def part(scene: Scene) -> None:
        async def busy() -> None:
            for _ in range(60):
                async with scene.pool.lease("a", "completions"):
                    await scene.clock.sleep(1)

        users = [asyncio.ensure_future(busy())]
        await scene.clock.advance(0.5)
        users.append(asyncio.ensure_future(busy()))
        waiting = asyncio.ensure_future(use(scene.pool, "b"))
        await scene.clock.advance(9)
        assert scene.pool.is_ready("a", "completions")
        await scene.clock.advance(1)
        assert not scene.pool.is_ready("a", "completions")
        assert scene.pool.boot("a", "completions")["stage"] == "yielding"
        assert not waiting.done()
        await scene.clock.advance(1)
        assert (await waiting).model_id == "b"
        await scene.clock.advance(60)
        await asyncio.gather(*users)
        assert [each.endpoint.model_id for each in scene.launcher.engines] == ["a", "b", "a"]
        assert [event.model_id for event in scene.events if event.detail == "evicted"] == ["a", "b"]

    play(part, "a", "b", max_engines=1)


def test_two_models_that_are_always_busy_take_turns() -> None:
    async def part(scene: Scene) -> None:
        served = {"a": 0, "b": 0}

        async def busy(model_id: str) -> None:
            while scene.clock.monotonic() < 100:
                async with scene.pool.lease(model_id, "completions"):
                    served[model_id] += 1
                    await scene.clock.sleep(1)

        users = [asyncio.ensure_future(busy(model_id)) for model_id in "aabb"]
        await scene.clock.advance(120)
        await asyncio.gather(*users)
        assert min(served.values()) > 60
        assert 6 < len(scene.launcher.engines) < 12

    play(part, "a", "b", max_engines=1)


def test_the_engine_that_has_run_longest_yields_and_goes_on_when_another_place_is_free() -> None:
    async def part(scene: Scene) -> None:
        async with scene.pool.lease("a", "completions"):
            async with scene.pool.lease("b", "completions"):
                first = asyncio.ensure_future(use(scene.pool, "c"))
                await scene.clock.advance(11)
                assert scene.pool.boot("a", "completions")["stage"] == "yielding"
                more = asyncio.ensure_future(use(scene.pool, "a"))
                await scene.clock.advance(1)
                assert not more.done()
            await first
            assert (await more).generation == 1
            assert scene.pool.is_ready("a", "completions")
        assert scene.launcher.running == [("a", "completions"), ("c", "completions")]

    play(part, "a", "b", "c", max_engines=2)


def test_a_start_that_nobody_waits_for_any_more_takes_no_place() -> None:
    async def part(scene: Scene) -> None:
        async with scene.pool.lease("a", "completions"):
            waiting = asyncio.ensure_future(use(scene.pool, "b"))
            await scene.clock.advance(20)
            waiting.cancel()
            await scene.clock.advance(44)
            assert scene.pool.boot("b", "completions")["stage"] == "queued"
            await scene.clock.advance(1)
            assert scene.pool.boot("b", "completions")["stage"] == "cold"
            assert scene.pool.is_ready("a", "completions")
        await scene.clock.advance(1)
        assert scene.launcher.running == [("a", "completions")]
        assert (scene.events[-1].model_id, scene.events[-1].detail) == ("b", "nobody waits for it")

    play(part, "a", "b", max_engines=1)


def test_a_client_that_comes_again_every_half_minute_gets_its_engine() -> None:
    async def part(scene: Scene) -> None:
        async with scene.pool.lease("a", "completions"):
            for _ in range(3):
                asking = asyncio.ensure_future(use(scene.pool, "b"))
                await scene.clock.advance(1)
                asking.cancel()
                await scene.clock.advance(29)
        await scene.clock.advance(1)
        assert scene.launcher.running == [("b", "completions")]

    play(part, "a", "b", max_engines=1)
