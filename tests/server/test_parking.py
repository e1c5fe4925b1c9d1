"""An engine that nobody uses sleeps, wakes when it is needed, and is ended where it cannot."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from streamtap.errors import EngineDead, EngineFailed, ServerRestarting
from streamtap.server.config import ServerConfig
from streamtap.server.metrics import Metrics
from streamtap.server.pool.pool import Pool
from streamtap.server.pool.slot import Slot
from streamtap.testing.sleepy_launcher import SLEEPERS, Night, play_night
from streamtap.testing.stub_launcher import StubLauncher, use


def test_an_idle_engine_sleeps_and_the_next_lease_wakes_it() -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.sleep_seconds, night.launcher.plan.wake_seconds = 4, 3
        first = await night.use()
        await night.clock.advance(100)
        assert (night.stage(), night.told()) == ("parking", ["starting", "ready"])
        await night.clock.advance(4)
        view = night.pool.boot("a", "completions")
        assert (view["warm"], view["stage"], view["stage_label"]) == (False, "parked", "Asleep until it is needed")
        assert night.pool.states()[0]["state"] == "parked"
        assert not night.pool.is_ready("a", "completions")
        await night.clock.advance(10_000)
        assert night.launcher.running == [("a", "completions")]

        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(2)
        view = night.pool.boot("a", "completions")
        assert (view["stage"], view["stage_label"], view["stage_age_s"]) == ("waking", "Waking up", 2)
        await night.clock.advance(1)
        assert await asking == first
        assert night.pool.is_ready("a", "completions")
        assert night.launcher.runs[0].calls == ["sleep", "wake"]
        assert night.told() == ["starting", "ready", "parked", "waking", "ready"]
        assert [(event.seconds, event.detail) for event in night.events[2:]] == [(4, "idle"), (None, ""), (3, "")]

    play_night(part)


def test_many_leases_at_once_wake_it_once() -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.wake_seconds = 3
        await night.sleep()
        users = [asyncio.ensure_future(night.use()) for _ in range(20)]
        await night.clock.advance(3)
        await asyncio.gather(*users)
        assert night.launcher.runs[0].calls == ["sleep", "wake"]
        await night.clock.advance(99)
        assert night.stage() == "ready"
        await night.clock.advance(1)
        assert night.stage() == "parked"

    play_night(part)


def test_an_engine_that_sleeps_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    idle_left = Slot.idle_left_seconds
    monkeypatch.setattr(Slot, "idle_left_seconds", lambda slot: looks.append(slot) or idle_left(slot))

    async def part(night: Night) -> None:
        await night.sleep()
        await night.sleep()
        looked, tasks = len(looks), len(asyncio.all_tasks())
        await night.clock.advance(1000)
        assert len(looks) == looked
        await night.sleep()
        assert len(asyncio.all_tasks()) == tasks

    play_night(part)


def test_a_lease_while_it_goes_to_sleep_waits_for_the_end_of_that_and_then_wakes_it() -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.sleep_seconds, night.launcher.plan.wake_seconds = 10, 3
        await night.use()
        await night.clock.advance(102)
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(7)
        assert night.stage() == "parking"
        await night.clock.advance(2)
        assert night.stage() == "waking"
        await night.clock.advance(2)
        assert (await asking).generation == 1
        assert night.told() == ["starting", "ready", "parked", "waking", "ready"]

    play_night(part)


@pytest.mark.parametrize("at", [99, 101, 105], ids=["idle", "falling asleep", "asleep"])
@pytest.mark.parametrize("seconds", [0, 1, 4])
def test_a_lease_that_is_cancelled_leaves_an_engine_that_serves_the_next(at: float, seconds: float) -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.sleep_seconds = night.launcher.plan.wake_seconds = 4
        await night.use()
        await night.clock.advance(at)
        leaving = [asyncio.ensure_future(night.use()) for _ in range(2)]
        await night.clock.advance(seconds)
        for each in leaving:
            each.cancel()
        await night.clock.advance(20)
        assert night.stage() == "ready"
        await night.use()
        await night.clock.advance(104)
        assert night.stage() == "parked"
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(4)
        assert (await asking).generation == 1

    play_night(part)


@pytest.mark.parametrize(
    ("fault", "seconds", "how"),
    [
        (EngineFailed("it answers 500 at /wake_up."), 1, "it did not wake up: it answers 500 at /wake_up"),
        (None, 1000, "it did not wake up: it took longer than 60 s"),
    ],
)
def test_an_engine_that_does_not_wake_is_ended_and_started_for_the_same_request(
    fault: EngineFailed | None, seconds: float, how: str
) -> None:
    async def part(night: Night) -> None:
        await night.sleep()
        night.launcher.plan.no_wake, night.launcher.plan.wake_seconds = fault, seconds
        night.launcher.seconds = 30
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(min(seconds, 60))
        assert night.stage() == "loading_weights"
        assert night.launcher.runs[0].stopped
        await night.clock.advance(30)
        assert (await asking).generation == 2
        assert night.told()[3:] == ["waking", "died", "starting", "ready"]
        assert night.events[4].detail == how

    play_night(part, max_engines=1)


@pytest.mark.parametrize(
    ("fault", "seconds", "how"),
    [
        (EngineFailed("it answers 404 at /sleep."), 1, "idle, not parked: it answers 404 at /sleep"),
        (None, 1000, "idle, not parked: it took longer than 120 s"),
    ],
)
def test_an_engine_that_does_not_fall_asleep_is_ended_with_one_event(
    fault: EngineFailed | None, seconds: float, how: str
) -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.no_sleep, night.launcher.plan.sleep_seconds = fault, seconds
        await night.use()
        await night.clock.advance(100)
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(min(seconds, 120))
        assert (await asking).generation == 2
        assert night.launcher.runs[0].stopped
        assert night.told() == ["starting", "ready", "stopped", "starting", "ready"]
        assert night.events[2].detail == how

    play_night(part, max_engines=1)


def test_an_engine_that_has_no_sleep_mode_is_ended_as_before() -> None:
    async def part(night: Night) -> None:
        launcher = StubLauncher(night.clock)
        pool = Pool(ServerConfig(models=SLEEPERS), clock=night.clock, on_event=night.events.append, launcher=launcher)
        await use(pool)
        await night.clock.advance(100)
        assert [event.detail for event in night.events] == ["", "", "idle"]
        assert launcher.running == []
        await pool.close()

    play_night(part)


def test_an_engine_that_dies_in_its_sleep_is_noticed_at_once_and_started_for_the_next_lease() -> None:
    async def part(night: Night) -> None:
        await night.sleep()
        night.launcher.runs[0].kill()
        await night.clock.advance(0)
        assert (night.stage(), night.events[-1].kind) == ("cold", "died")
        assert night.events[-1].detail == "it was ended by signal 9"
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(0.9)
        assert night.stage() == "backing_off"
        await night.clock.advance(0.1)
        assert (await asking).generation == 2
        assert night.launcher.runs[1].calls == []

    play_night(part)


@pytest.mark.parametrize("first_seen_by", ["pool", "call"])
@pytest.mark.parametrize("when", ["falls asleep", "wakes"])
def test_an_engine_that_dies_on_its_way_is_started_for_who_waits(when: str, first_seen_by: str) -> None:
    async def part(night: Night) -> None:
        plan = night.launcher.plan
        if when == "falls asleep":
            plan.sleep_seconds = 5
            await night.use()
            await night.clock.advance(100)
        else:
            await night.sleep()
            plan.wake_seconds = 5
        asking = asyncio.ensure_future(night.use())
        await night.clock.advance(2)
        if first_seen_by == "pool":
            night.launcher.runs[0].kill()
        else:
            plan.no_sleep = plan.no_wake = EngineDead("it was ended by signal 9.")
        await night.clock.advance(4)
        assert (await asking).generation == 2
        assert [event.detail for event in night.events if event.kind == "died"] == ["it was ended by signal 9"]

    play_night(part, max_engines=1)


def test_an_engine_that_dies_while_it_waits_for_a_place_is_started_once_it_has_one() -> None:
    async def part(night: Night) -> None:
        await night.sleep()
        async with night.pool.lease("b", "completions"):
            asking = asyncio.ensure_future(night.use())
            await night.clock.advance(2)
            assert night.stage() == "queued"
            night.launcher.runs[0].kill()
            await night.clock.advance(2)
            assert night.stage() == "queued"
        await night.clock.advance(1)
        assert (await asking).generation == 2
        assert night.launcher.running == [("b", "completions"), ("a", "completions")]

    play_night(part, max_engines=1)


@pytest.mark.parametrize(("at", "seconds", "stage"), [(102, 1, "parking"), (105, None, "parked"), (110, 2, "waking")])
def test_closing_ends_it_wherever_it_is(at: float, seconds: float | None, stage: str) -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.sleep_seconds = night.launcher.plan.wake_seconds = 4
        await night.use()
        await night.clock.advance(at)
        asking = None if seconds is None else asyncio.ensure_future(night.use())
        await night.clock.advance(seconds or 0)
        assert night.stage() == stage
        await night.pool.close()
        assert night.events[-1].detail == "closing"
        assert (night.launcher.running, night.stage()) == ([], "cold")
        with nullcontext() if asking is None else pytest.raises(ServerRestarting, match="restarting"):
            await (asking or asyncio.sleep(0))

    play_night(part)


def test_metrics_count_starts_and_wake_ups_apart_and_know_who_is_parked() -> None:
    metrics = Metrics()

    async def part(night: Night) -> None:
        await night.sleep()
        metrics.engines(night.pool.states())
        lines = metrics.text().decode().splitlines()
        assert 'streamtap_engine_state{model="a",role="completions",state="parked"} 1.0' in lines
        assert 'streamtap_engine_state{model="a",role="completions",state="ready"} 0.0' in lines
        await night.sleep()
        await night.sleep()

    play_night(part, listen=metrics.heard)
    lines = metrics.text().decode().splitlines()
    assert 'streamtap_cold_starts_total{model="a",role="completions"} 1.0' in lines
    assert 'streamtap_wake_ups_total{model="a",role="completions"} 2.0' in lines
