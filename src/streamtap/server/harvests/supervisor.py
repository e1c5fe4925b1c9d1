"""``Supervisor``: starts workers when there are jobs, sees to what they leave, and ends them with the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from streamtap.errors import SettingsError
from streamtap.server.clock import Clock
from streamtap.server.config import ServerConfig
from streamtap.server.harvests.jobs import LANES, Lane
from streamtap.server.harvests.orders import WorkerOrders
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.harvests.tidying import Tidying
from streamtap.server.harvests.worker_process import COMMAND, WorkerProcess
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.log import note
from streamtap.server.pool.engine_log import EngineLog

#: Between two looks for jobs that nobody told of: another gateway's, or those of a worker that died elsewhere.
_LOOK_SECONDS = 5.0
#: And while jobs wait for a worker.
_SOON_SECONDS = 1.0
_TIDY_SECONDS = 60.0
#: Starts that fail one after the other until no more jobs are taken on.
_MOST_FAILURES = 3
_MOST_GRACE_SECONDS = 10.0
_Result = TypeVar("_Result")


@dataclass
class _LaneState:
    """The workers of a lane, and how their starts went."""

    models: Sequence[str]
    workers: list[WorkerProcess] = field(default_factory=list)
    failures: int = 0
    not_before: float = 0.0


class Supervisor:
    """The workers of one gateway.

    Args:
        config: Of the gateway.
        orders: What workers are told.
        harvests: The ledger's side; its calls run on threads.
        command: What starts a worker.
    """

    def __init__(
        self,
        config: ServerConfig,
        orders: WorkerOrders,
        harvests: Harvests,
        *,
        clock: Clock,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._config, self._orders, self._harvests = config, orders, harvests
        self._clock, self._command = clock, command
        self._store = HarvestStore(orders.root)
        self._lanes: dict[Lane, _LaneState] = {lane: _LaneState([*orders.of_lane(lane)]) for lane in LANES}
        self._tidying = Tidying(harvests, self._store, Path(orders.spools), keep_days=config.harvest.keep_days)
        self._woken: asyncio.Future[None] | None = None
        self._looking: asyncio.Task[bool] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self._file: Path | None = None

    def available(self, lane: Lane) -> bool:
        """Whether jobs of a lane are taken just now: not where none may start, nor where the last few could not."""
        state = self._lanes[lane]
        fails = state.failures >= _MOST_FAILURES and self._clock.monotonic() < state.not_before
        return self._config.harvest.workers > 0 and not self._is_closing and not fails

    def wake(self) -> None:
        """Look for jobs now."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def run(self) -> None:
        """Look for jobs and see to workers until cancelled; ``close`` has to follow."""
        if not self._config.harvest.workers:
            return
        next_tidy, tidying = self._clock.monotonic(), None
        while True:
            self._woken = asyncio.get_running_loop().create_future()
            self._looking = asyncio.ensure_future(self._look())
            soon = await self._tried(self._looking, "harvest_look_failed")
            # One at a time: of a store with much to remove it takes longer than until the next.
            if self._clock.monotonic() >= next_tidy and (tidying is None or tidying.done()):
                next_tidy = self._clock.monotonic() + _TIDY_SECONDS
                tidying = self._later(self._tried(asyncio.to_thread(self._tidying.once), "harvest_tidying_failed"))
            await self._clock.wait(self._woken, _SOON_SECONDS if soon else _LOOK_SECONDS)

    async def close(self) -> None:
        """End the workers; the jobs that they have wait for others."""
        self._is_closing = True
        self._tidying.stop()
        if self._looking is not None:
            # It may be starting a worker, which has to end too.
            await asyncio.wait([self._looking])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.stop() for state in self._lanes.values() for worker in state.workers))
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    async def _look(self) -> bool:
        """Start workers where jobs wait for them; whether any do."""
        soon = False
        for lane, state in self._lanes.items():
            waiting, free = await asyncio.to_thread(self._standing, lane, state)
            # A worker without a job takes one at once, or as soon as it is up.
            if waiting > free and self._may_start(state):
                await self._start(lane, state)
            soon = soon or waiting > 0
        return soon

    def _standing(self, lane: Lane, state: _LaneState) -> tuple[int, int]:
        """How many jobs of a lane wait, and how many of our workers have none; blocks."""
        store = self._store.identity
        waiting = self._harvests.waiting(state.models, store=store, lane=lane) if state.models else 0
        if not waiting:
            return 0, 0
        busy = {job.worker for job in self._harvests.under_way(store=store)}
        return waiting, sum(worker.name not in busy for worker in state.workers)

    def _may_start(self, state: _LaneState) -> bool:
        has_room = len(state.workers) < self._config.harvest.workers
        return has_room and not self._is_closing and self._clock.monotonic() >= state.not_before

    async def _start(self, lane: Lane, state: _LaneState) -> None:
        try:
            self._file = self._orders.write(self._config.data_dir)
            worker = await WorkerProcess.spawn(
                lane,
                self._file,
                log=EngineLog(self._config.data_dir / "logs" / f"harvest-{lane}.log"),
                clock=self._clock,
                grace_seconds=max(0.1, min(_MOST_GRACE_SECONDS, self._config.timing.stop_seconds - 1)),
                command=self._command,
            )
        except (OSError, SettingsError) as error:
            self._failed(state)
            note("harvest_worker_not_started", lane=lane, error=type(error).__name__)
            return
        state.workers.append(worker)
        note("harvest_worker_started", lane=lane, worker=worker.name)
        self._later(self._seen_off(lane, state, worker))

    async def _seen_off(self, lane: Lane, state: _LaneState, worker: WorkerProcess) -> None:
        """Wait for a worker's end, and free what it had."""
        status = await asyncio.shield(worker.exit)
        state.workers.remove(worker)
        had = await self._tried(asyncio.to_thread(self._harvests.worker_ended, worker.name), "harvest_freeing_failed")
        note("harvest_worker_ended", lane=lane, worker=worker.name, status=status, jobs=had or 0)
        # One that had a job had started well; how often a job may end its worker is counted with the job.
        if status and not had:
            self._failed(state)
        else:
            state.failures, state.not_before = 0, 0.0
        self.wake()

    def _failed(self, state: _LaneState) -> None:
        timing = self._config.timing
        wait = min(timing.max_backoff_seconds, timing.restart_backoff_seconds * 2**state.failures)
        state.failures += 1
        state.not_before = self._clock.monotonic() + wait

    async def _tried(self, work: Awaitable[_Result], event: str) -> _Result | None:
        """What ``work`` gives; a database or store that fails for a while must not end the supervisor."""
        trying = asyncio.ensure_future(work)
        await asyncio.wait([trying])
        if (error := trying.exception()) is None:
            return trying.result()
        note(event, error=type(error).__name__)
        return None

    def _later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
