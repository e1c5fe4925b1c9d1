"""Where engines are parked: beside those that run, as long as the host has the memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from streamtap.server.config import ModelConfig
from streamtap.server.pool.host_memory import LocalHost, Memory
from streamtap.testing.sleepy_launcher import SLEEPERS, Night, play_night

KB = 1024


def test_a_parked_engine_holds_no_place_and_takes_one_to_wake() -> None:
    async def part(night: Night) -> None:
        await night.sleep("a")
        async with night.pool.lease("b", "completions"):
            asking = asyncio.ensure_future(night.use("a"))
            await night.clock.advance(5)
            assert (night.stage("a"), night.stage("b")) == ("queued", "ready")
            assert night.launcher.runs[0].calls == ["sleep"]
        await night.clock.advance(0)
        assert (await asking).generation == 1
        assert (night.stage("a"), night.stage("b")) == ("ready", "parked")
        assert [(event.kind, event.detail) for event in night.events if event.model_id == "b"][2:] == [
            ("parked", "evicted")
        ]

    play_night(part, max_engines=1)


def test_the_next_start_waits_until_the_engine_that_makes_room_is_asleep() -> None:
    async def part(night: Night) -> None:
        night.launcher.plan.sleep_seconds = 4
        await night.use("a")
        asking = asyncio.ensure_future(night.use("b"))
        await night.clock.advance(3)
        assert (night.stage("a"), night.stage("b")) == ("parking", "queued")
        assert len(night.launcher.runs) == 1
        await night.clock.advance(1)
        await asking
        assert (night.stage("a"), night.stage("b")) == ("parked", "ready")

    async def only_one(night: Night) -> None:
        night.launcher.plan.sleep_seconds = 4
        await night.use("a")
        await night.use("b")
        asking = asyncio.ensure_future(night.use("c"))
        await night.clock.advance(4)
        await asking
        assert [night.stage(each) for each in "abc"] == ["parked", "ready", "ready"]

    play_night(part, max_engines=1)
    play_night(only_one, max_engines=2)


def test_two_engines_that_are_always_busy_take_turns_by_sleeping() -> None:
    async def part(night: Night) -> None:
        served = {"a": 0, "b": 0}

        async def busy(model_id: str) -> None:
            while night.clock.monotonic() < 100:
                async with night.pool.lease(model_id, "completions"):
                    served[model_id] += 1
                    await night.clock.sleep(1)

        users = [asyncio.ensure_future(busy(model_id)) for model_id in "aabb"]
        await night.clock.advance(120)
        await asyncio.gather(*users)
        assert min(served.values()) > 60
        assert len(night.launcher.runs) == 2
        assert night.launcher.runs[0].calls.count("wake") > 2

    play_night(part, max_engines=1)


def test_one_that_nobody_waits_for_any_more_sleeps_on() -> None:
    async def part(night: Night) -> None:
        await night.sleep("a")
        async with night.pool.lease("b", "completions"):
            asking = asyncio.ensure_future(night.use("a"))
            await night.clock.advance(5)
            asking.cancel()
            await night.clock.advance(44)
            assert night.stage("a") == "queued"
            await night.clock.advance(1)
            assert night.stage("a") == "parked"
            assert (night.events[-1].kind, night.events[-1].detail) == ("parked", "nobody waits for it")
        await night.use("a")
        assert night.launcher.runs[0].calls == ["sleep", "wake"]

    play_night(part, max_engines=1)


def test_one_that_never_idles_is_parked_for_another_and_minded_when_it_woke() -> None:
    async def part(night: Night) -> None:
        await night.use("a")
        await night.clock.advance(1000)
        assert night.stage("a") == "ready"
        await night.use("b")
        assert night.stage("a") == "parked"
        await night.use("a")
        night.launcher.runs[0].kill()
        await night.clock.advance(0)
        assert (night.stage("a"), night.events[-1].kind) == ("cold", "died")

    play_night(part, *(replace(model, idle_seconds=0) for model in SLEEPERS), max_engines=1)


@pytest.mark.parametrize(
    ("weights", "used", "how"),
    [
        (None, 0, "how large its weights are is not known, since their files are not on this machine"),
        (100, None, "how much memory is free is not known on this system"),
        (
            100,
            701,
            "its weights may take 0.0 GB of the host's memory, of which 0.0 GB are free and 0.0 GB are to stay so",
        ),
    ],
)
def test_without_the_memory_it_is_ended_and_an_event_says_why(weights: int | None, used: int | None, how: str) -> None:
    async def part(night: Night) -> None:
        night.host.weights, night.host.used = weights, used
        await night.sleep()
        assert night.stage() == "cold"
        assert night.launcher.runs[0].calls == []
        assert (night.events[-1].kind, night.events[-1].detail) == ("stopped", f"idle, not parked: {how}")

    play_night(part)


@pytest.mark.parametrize("weights", [100, None], ids=["fits", "does not"])
def test_whoever_leases_it_before_it_goes_keeps_it(weights: int | None) -> None:
    async def part(night: Night) -> None:
        night.host.lookup_seconds, night.host.weights = 5, weights
        await night.use()
        await night.clock.advance(102)
        async with night.pool.lease("a", "completions"):
            await night.clock.advance(200)
            assert night.stage() == "ready"
        assert night.told() == ["starting", "ready"]
        await night.clock.advance(110)
        assert night.stage() == ("cold" if weights is None else "parked")

    play_night(part)


def test_memory_that_is_just_enough_is_taken_once_and_kept() -> None:
    async def part(night: Night) -> None:
        night.host.used = 700
        await night.sleep()
        assert night.stage() == "parked"
        night.host.used = 840  # too little for a second copy, but this one has its own
        await night.sleep()
        assert night.launcher.runs[0].calls == ["sleep", "wake", "sleep"]
        night.launcher.runs[0].kill()
        await night.clock.advance(1)
        await night.sleep()
        assert night.launcher.runs[1].calls == []

    play_night(part)


def test_what_another_takes_that_is_on_its_way_counts() -> None:
    async def part(night: Night) -> None:
        night.host.used = 600
        night.launcher.plan.sleep_seconds = 50
        await night.use("a")
        await night.use("b")
        await night.clock.advance(100)
        assert sorted((night.stage("a"), night.stage("b"))) == ["cold", "parking"]

    play_night(part)


def test_those_that_were_parked_first_are_ended_for_another() -> None:
    async def part(night: Night) -> None:
        night.host.used = 550
        await night.sleep("a", "b")
        assert (night.stage("a"), night.stage("b")) == ("parked", "parked")
        await night.sleep("c")
        assert [night.stage(each) for each in "abc"] == ["cold", "parked", "parked"]
        ended = [(event.model_id, event.detail) for event in night.events if event.kind == "stopped"]
        assert ended == [("a", "it makes room for another that is parked")]

    play_night(part)


def test_none_is_ended_for_another_that_would_not_fit_even_then() -> None:
    async def part(night: Night) -> None:
        night.host.used = 500
        await night.sleep("a", "b")
        night.host.used = 720
        await night.sleep("c")
        assert [night.stage(each) for each in "abc"] == ["parked", "parked", "cold"]

    play_night(part)


def test_no_more_are_parked_than_may_run() -> None:
    async def part(night: Night) -> None:
        await night.sleep("a", "b", "c")
        assert [night.stage(each) for each in "abc"] == ["cold", "parked", "parked"]

    async def while_others_wake(night: Night) -> None:
        await night.use("a")
        await night.use("b")
        async with night.pool.lease("b", "completions"):
            waking = asyncio.ensure_future(night.use("a"))
            await night.clock.advance(1)
            assert night.stage("a") == "queued"
        await waking
        assert (night.stage("a"), night.stage("b")) == ("ready", "parked")
        await night.use("c")
        assert [night.stage(each) for each in "abc"] == ["parked", "cold", "ready"]

    play_night(part, max_engines=2)
    play_night(while_others_wake, max_engines=1)


def test_when_memory_gets_short_those_that_were_parked_first_are_ended_one_by_one() -> None:
    async def part(night: Night) -> None:
        await night.sleep("a", "b", "c")
        night.host.used = 700
        await night.clock.advance(10)
        assert [night.stage(each) for each in "abc"] == ["cold", "parked", "parked"]
        assert night.events[-1].detail == "the host's memory is short"
        night.host.used = 900
        await night.clock.advance(10)
        assert [night.stage(each) for each in "abc"] == ["cold", "cold", "cold"]
        assert len([event for event in night.events if event.kind == "stopped"]) == 3
        await night.use("a")
        await night.clock.advance(10)
        assert night.stage("a") == "ready"

    play_night(part)


def test_one_that_somebody_waits_for_is_not_ended_for_memory() -> None:
    async def part(night: Night) -> None:
        await night.sleep("a")
        night.launcher.plan.wake_seconds = 20
        asking = asyncio.ensure_future(night.use("a"))
        night.host.used = 1000
        await night.clock.advance(20)
        assert (await asking).generation == 1

    play_night(part)


def _host(folder: Path, limits: dict[str, tuple[str, int, int]] | None = None, own: str = "/a/b") -> LocalHost:
    """A machine with 100 KB, of which 60 are available, and control groups: limit, bytes used, bytes of old files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(
        "MemTotal:   100 kB\nMemFree:   1 kB\nMemAvailable:   60 kB\nHugePages: 0\n"
    )
    (folder / "proc" / "self" / "cgroup").write_text(f"4:memory:/old\n0::{own}\n")
    for name, (limit, used, files) in (limits or {}).items():
        group = folder / "groups" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
    return LocalHost(folder / "proc", folder / "groups")


def test_memory_is_the_least_of_the_machine_and_the_limits_around_this_process(tmp_path: Path) -> None:
    machine = Memory(100 * KB, 60 * KB)
    loose = {"a": (str(90 * KB), 10 * KB, 0), "a/b": ("max", 10 * KB, 0)}
    tight = {"a": (str(50 * KB), 40 * KB, 5 * KB), "a/b": (str(80 * KB), 1 * KB, 0), "other": ("1", 1, 0)}

    assert _host(tmp_path / "none").memory() == machine
    assert _host(tmp_path / "loose", loose).memory() == machine
    assert _host(tmp_path / "tight", tight).memory() == Memory(50 * KB, 15 * KB)
    assert _host(tmp_path / "over", {"": ("100", 300, 0)}, own="/").memory() == Memory(100, 0)
    assert LocalHost(tmp_path / "nothing").memory() is None
    (tmp_path / "none" / "proc" / "meminfo").write_text("MemTotal:   100 kB\n")
    assert LocalHost(tmp_path / "none" / "proc").memory() is None


def test_weights_take_what_their_files_have(tmp_path: Path) -> None:
    def of(folder: str, dtype: str = "auto", **files: int) -> int | None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        for name, size in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_bytes(b"x" * size)
        model = ModelConfig(id="m", checkpoint=str(tmp_path / folder), dtype=dtype)
        return asyncio.run(LocalHost().weights_bytes(model))

    assert of("one", model__safetensors=7, tokenizer__json=1000) == 7
    assert of("twins", one__safetensors=3, two__safetensors=4, consolidated__safetensors=7, old__bin=7) == 7
    assert of("only", consolidated__safetensors=7) == 7
    assert of("torch", pytorch_model__bin=7) == 7
    assert of("wide", "float32", model__safetensors=7) == 14
    assert of("empty") is None
    assert asyncio.run(LocalHost().weights_bytes(ModelConfig(id="m", checkpoint="org/not-here"))) is None
    (tmp_path / "q.gguf").write_bytes(b"x" * 9)
    assert asyncio.run(LocalHost().weights_bytes(ModelConfig(id="m", checkpoint=str(tmp_path / "q.gguf")))) == 9
