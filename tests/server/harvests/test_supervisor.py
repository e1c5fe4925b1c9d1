"""The gateway's side of bulk jobs over real worker processes, with a fake model in them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import SettingsError
from streamtap.server.clock import SystemClock
from streamtap.server.config import HarvestConfig
from streamtap.server.harvests import supervisor
from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.orders import WorkerOrders
from streamtap.server.harvests.supervisor import Supervisor
from streamtap.server.harvests.tidying import Tidying
from streamtap.server.harvests.worker_process import WorkerProcess

WORKER = (sys.executable, "-m", "streamtap.testing.fake_harvest_worker")


class Watched:
    """A supervisor that runs, and what it did."""

    def __init__(self, shop: Any, *options: str, harvest: HarvestConfig | None = None) -> None:
        self.shop, self.ran = shop, shop.folder / "ran"
        config = replace(shop.config, harvest=harvest or shop.config.harvest)
        orders = replace(shop.orders, idle_seconds=config.harvest.idle_seconds)
        command = (*WORKER, "--ran", str(self.ran), *options)
        self.supervisor = Supervisor(config, orders, shop.harvests, clock=SystemClock(), command=command)

    def submit(self, *args: Any, **named: Any) -> Job:
        job: Job = self.shop.submit(*args, **named)
        self.supervisor.wake()
        return job

    @property
    def batches(self) -> list[int]:
        """For each batch that was begun the process that did it."""
        return [int(line) for line in self.ran.read_text().split()] if self.ran.exists() else []

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.shop.folder.glob("logs/harvest-*.log")))

    async def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, self.log
            await asyncio.sleep(0.01)

    async def kill_one(self, number: int, dice: random.Random) -> None:
        """Kill the worker of that number once it has made a shard or two, wherever it stands in the next."""
        least = dice.randint(2, 3)

        def has_begun() -> bool:
            batches = self.batches
            return len(set(batches)) == number and batches.count(batches[-1]) >= least

        await self.until(has_begun)
        await asyncio.sleep(dice.random() * 0.05)
        worker = self.batches[-1]
        os.kill(worker, signal.SIGKILL)
        await self.until(lambda: not _is_running(worker))

    async def until_state(self, job: Job, state: str) -> Job:
        await self.until(lambda: self.shop.now(job).state == state)
        found: Job = self.shop.now(job)
        return found


def _play(watched: Watched, part: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        running = asyncio.ensure_future(watched.supervisor.run())
        try:
            await part()
        finally:
            running.cancel()
            await watched.supervisor.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def _is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_moves_on_by_itself_and_its_worker_ends_when_idle(shop: Any) -> None:
    watched = Watched(shop, harvest=HarvestConfig(idle_seconds=0.5))

    async def part() -> None:
        await asyncio.sleep(0.3)
        assert not (shop.folder / "logs").exists(), "nothing is started for nothing"
        jobs = [watched.submit(["one"] * 10), watched.submit(["two"] * 10)]
        for job in jobs:
            await watched.until_state(job, "done")
            shop.run_of(job).verify()
        worker = set(watched.batches)
        assert len(worker) == 1
        await watched.until(lambda: not _is_running(min(worker)))
        again = watched.submit()
        await watched.until_state(again, "done")
        assert len(set(watched.batches)) == 2
        assert watched.supervisor.available("small")

    _play(watched, part)


def test_a_small_job_on_a_warm_engine_takes_less_than_two_seconds(shop: Any) -> None:
    watched = Watched(shop)

    async def part() -> None:
        await watched.until_state(watched.submit(), "done")
        began = asyncio.get_running_loop().time()
        await watched.until_state(watched.submit(), "done")
        assert asyncio.get_running_loop().time() - began < 2

    _play(watched, part)


def test_jobs_that_were_there_before_the_start_are_done(shop: Any) -> None:
    job, watched = shop.submit(), Watched(shop)

    async def part() -> None:
        await watched.until_state(job, "done")

    _play(watched, part)


def test_each_lane_has_its_worker(shop: Any) -> None:
    watched = Watched(shop, "--batch-seconds", "0.3")

    async def part() -> None:
        large = watched.submit(["one"] * 60, model="huge")
        await watched.until_state(large, "running")
        small = watched.submit()
        await watched.until_state(small, "done")
        assert shop.now(large).state == "running", "a small model's job waits for no large one"

    _play(watched, part)


def test_more_workers_start_only_where_jobs_still_wait(shop: Any) -> None:
    watched = Watched(shop, "--batch-seconds", "0.4", harvest=HarvestConfig(workers=2))

    async def part() -> None:
        first = watched.submit(["one"] * 40, shard_size=4)
        await watched.until(lambda: len(set(watched.batches)) == 1)
        second = watched.submit(["one"] * 40, shard_size=4)
        await watched.until_state(second, "running")
        assert shop.now(first).state == "running"
        third = watched.submit()
        await watched.until_state(third, "done")
        assert len(set(watched.batches)) == 2

    _play(watched, part)


def test_the_end_of_the_gateway_ends_its_workers_and_keeps_their_jobs(shop: Any) -> None:
    watched = Watched(shop, "--batch-seconds", "0.1")
    made: list[Job] = []

    async def part() -> None:
        made.append(watched.submit(["one"] * 200, shard_size=4))
        await watched.until(lambda: shop.now(made[0]).shards_done >= 2)

    _play(watched, part)
    waiting = shop.now(made[0])
    assert (waiting.state, waiting.worker) == ("pending", None)
    assert not _is_running(watched.batches[-1])
    assert not (shop.folder / "harvest-worker.json").exists()
    begun = len(watched.batches)

    again = Watched(shop)

    async def rest() -> None:
        await again.until_state(made[0], "done")

    _play(again, rest)
    assert len(again.batches) <= 50 + 1, f"{begun} were begun before"
    shop.run_of(made[0]).verify()


def test_a_worker_that_is_killed_twenty_times_loses_and_doubles_nothing(shop: Any) -> None:
    prompts = [f"prompt {number}" for number in range(360)]
    watched = Watched(shop, "--batch-seconds", "0.03")
    dice = random.Random(5)

    async def part() -> None:
        job = watched.submit(prompts, shard_size=4)
        for kill in range(1, 21):
            await watched.kill_one(kill, dice)
        done = await watched.until_state(job, "done")
        assert (done.prompts_done, done.shards_done) == (360, 90)
        assert len(set(watched.batches)) == 21
        assert len(watched.batches) <= 90 + 20, "forward work is repeated by one shard a kill at most"
        run = shop.run_of(job)
        run.verify()
        indices = [index for shard in run.manifest.shards for index in shard.prompt_indices]
        assert indices == list(range(360))

        whole = shop.submit(prompts, shard_size=4)
        watched.supervisor.wake()
        await watched.until_state(whole, "done")
        other = shop.run_of(whole)
        assert [shard.sha256 for shard in run.manifest.shards] == [shard.sha256 for shard in other.manifest.shards]
        for name, values in run.statistics().items():
            np.testing.assert_array_equal(values, other.statistics()[name])

    _play(watched, part)


def test_a_job_that_kills_every_worker_fails_and_the_next_goes_on(shop: Any) -> None:
    watched = Watched(shop, "--die-after", "2")

    async def part() -> None:
        long, short = watched.submit(["one"] * 40, shard_size=20), watched.submit()
        failed = await watched.until_state(long, "failed")
        assert failed.error is not None
        assert failed.error.code == "engine_dead"
        await watched.until_state(short, "done")

    _play(watched, part)


def test_a_model_that_does_not_load_fails_its_job(shop: Any) -> None:
    watched = Watched(shop, "--fail-load")

    async def part() -> None:
        failed = await watched.until_state(watched.submit(), "failed")
        assert failed.error is not None
        assert "its engine could not be loaded" in failed.error.message
        await watched.until(lambda: "/secret/path" in watched.log)

    _play(watched, part)


def test_where_no_worker_starts_no_jobs_are_taken_until_the_next_try(shop: Any) -> None:
    watched = Watched(shop, "--fail-start")

    async def part() -> None:
        assert watched.supervisor.available("small")
        watched.submit()
        await watched.until(lambda: not watched.supervisor.available("small"))
        assert watched.supervisor.available("large")
        # It goes on trying, more and more seldom, and is open again before each try.
        await watched.until(lambda: watched.supervisor.available("small"))

    _play(watched, part)


def test_a_gateway_without_workers_takes_no_jobs(shop: Any) -> None:
    watched = Watched(shop, harvest=HarvestConfig(workers=0))

    async def part() -> None:
        assert not watched.supervisor.available("small")
        watched.submit()
        await asyncio.sleep(0.2)
        assert watched.batches == []

    _play(watched, part)


def test_a_worker_that_cannot_use_what_it_is_told_says_so_in_its_log(shop: Any) -> None:
    watched = Watched(shop)
    watched.supervisor._orders = replace(watched.supervisor._orders, database="mysql://u:hunter2@h/d")

    async def part() -> None:
        watched.submit()
        await watched.until(lambda: "harvest_worker_failed" in watched.log)
        assert "database must be sqlite or postgresql" in watched.log
        assert "hunter2" not in watched.log

    _play(watched, part)


def test_a_database_that_fails_for_a_while_does_not_end_the_supervisor(
    shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched, waiting, count = Watched(shop), shop.harvests.waiting, iter(range(100))

    def failing(*args: Any, **named: Any) -> int:
        if next(count) == 0:
            raise OSError("the database is gone")
        found: int = waiting(*args, **named)
        return found

    monkeypatch.setattr(shop.harvests, "waiting", failing)

    async def part() -> None:
        await asyncio.sleep(0.1)
        await watched.until_state(watched.submit(), "done")

    with caplog.at_level("INFO"):
        _play(watched, part)
    assert "harvest_look_failed" in [record.message for record in caplog.records]


def test_what_workers_are_told_is_for_this_user_alone(shop: Any) -> None:
    watched = Watched(shop)

    async def part() -> None:
        file = shop.folder / "harvest-worker.json"
        watched.submit()
        await watched.until(file.exists)
        assert file.stat().st_mode & 0o777 == 0o600
        assert json.loads(file.read_text())["models"][0]["id"] == "tiny"

    _play(watched, part)


def test_a_disk_that_is_full_at_the_start_is_one_more_start_that_failed(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, write, count = Watched(shop), WorkerOrders.write, iter(range(100))

    def failing(orders: WorkerOrders, folder: Path) -> Path:
        if next(count) < 2:
            raise SettingsError("data_dir cannot be written: No space left on device; name another.")
        return write(orders, folder)

    monkeypatch.setattr(WorkerOrders, "write", failing)

    async def part() -> None:
        await watched.until_state(watched.submit(), "done")

    _play(watched, part)


def test_a_worker_that_is_being_started_as_the_gateway_ends_is_ended_too(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, spawn, started = Watched(shop), WorkerProcess.spawn, list[WorkerProcess]()
    is_starting = asyncio.Event()

    async def slow(*args: Any, **named: Any) -> WorkerProcess:
        is_starting.set()
        await asyncio.sleep(0.3)
        started.append(await spawn(*args, **named))
        return started[-1]

    monkeypatch.setattr(WorkerProcess, "spawn", slow)

    async def part() -> None:
        watched.submit()
        await is_starting.wait()

    _play(watched, part)
    assert [worker.exit.done() for worker in started] == [True]


def test_a_tidying_that_takes_long_is_not_begun_again(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, begun, ended = Watched(shop), list[int](), threading.Event()

    def slow(_tidying: Tidying) -> None:
        begun.append(1)
        ended.wait(20)

    monkeypatch.setattr(Tidying, "once", slow)
    monkeypatch.setattr(supervisor, "_TIDY_SECONDS", 0.0)

    async def look_ten_times() -> None:
        for _ in range(10):
            watched.supervisor.wake()
            await asyncio.sleep(0.02)

    async def part() -> None:
        await look_ten_times()
        assert len(begun) == 1
        ended.set()
        await look_ten_times()
        assert len(begun) > 1

    _play(watched, part)
