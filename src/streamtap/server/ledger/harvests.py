"""``Harvests``: bulk jobs and what they hold, exact among any number of gateways and workers.

::

    submit ─► pending ─► running ─► done │ failed     by the worker that has the lease, and by no other
                 ▲  └──────┤   └──► cancelled         by the key, at any time before
                 └─────────┘                          a worker that lets go; another's lease that ran out
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from streamtap.errors import EngineDead, HarvestNotCancellable, HarvestNotFound, HarvestUnavailable
from streamtap.server.config import Limits
from streamtap.server.db import Database, counters, job_rows
from streamtap.server.db.job_rows import Reach
from streamtap.server.harvests.jobs import Job, JobAsked, JobError, Lane
from streamtap.server.ledger.harvest_charges import charge, check_room, freed, refunded
from streamtap.server.ledger.keys import KeyRecord

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

Word = Literal["go", "cancel", "lost"]
#: Workers that may take a job one after the other without a new shard; then the job fails.
MOST_ATTEMPTS = 5
#: A job that waited so long is taken before those of the model that a worker has loaded.
_URGENT_SECONDS = 60.0
_FIRST_DELAY_SECONDS = 15.0
_LISTED = 100
#: Fields of a job that are columns as they are.
_SAME = (
    *("id", "key_id", "model", "lane", "state", "run_id", "n_prompts", "n_tokens", "n_shards", "created_at"),
    *("started_at", "completed_at", "prompts_done", "shards_done", "attempts", "worker", "worked_seconds"),
)


class Harvests:
    """The jobs of one database. Every call is one transaction and blocks for as long as the database takes."""

    def __init__(
        self,
        database: Database,
        limits: Limits,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        lease_seconds: float = 30.0,
    ) -> None:
        self._database = database
        self._limits = limits
        self._now = now
        self._lease = timedelta(seconds=lease_seconds)

    def check_room(self, key: KeyRecord, lane: Lane) -> None:
        """Refuse a job that would be refused in any case just now, so that it need not be counted first.

        Raises:
            LimitReached: as ``submit``.
        """
        with self._database.reading() as connection:
            check_room(connection, key, lane, self._limits, self._now())

    def submit(self, key: KeyRecord, asked: JobAsked, *, store: str = "") -> Job:
        """Take a job on: its slot, its place in the month, and its tokens, all or nothing.

        ``store`` names where its prompts lie and its files will.

        Raises:
            HarvestQuotaExceeded: the key has begun all the jobs of this month; the message says used/limit.
            HarvestConcurrencyExceeded: it has as many of this lane under way as it may.
            HarvestCapacityExceeded: all keys together have as many large ones as there may be.
            BudgetExceeded: the key or its user has not enough tokens left.
        """
        at = self._now()
        with self._database.writing() as connection:
            charge(connection, key, asked, self._limits, at)
            job_rows.add(connection, {**_row(asked), **_whose(key), "store": store, "created_at": at, "ready_at": at})
        return self.job(key, asked.id)

    def job(self, key: KeyRecord, job_id: str) -> Job:
        """A job of that key.

        Raises:
            HarvestNotFound: there is none of that id, or it is another key's.
        """
        with self._database.reading() as connection:
            return _job(_own(connection, key, job_id))

    def jobs(self, key: KeyRecord) -> list[Job]:
        """The key's newest jobs, the newest first, a hundred at most."""
        with self._database.reading() as connection:
            return [_job(row) for row in job_rows.of_key(connection, key.id, _LISTED)]

    def any_job(self, job_id: str) -> Job | None:
        """A job, whoever's it is."""
        with self._database.reading() as connection:
            row = job_rows.get(connection, job_id)
        return None if row is None else _job(row)

    def cancel(self, key: KeyRecord, job_id: str) -> Job:
        """End a job and free its slot; a worker that has it hears of it within a second or so.

        Raises:
            HarvestNotFound: as ``job``.
            HarvestNotCancellable: it is over already.
        """
        with self._database.writing() as connection:
            over = {"state": "cancelled", "completed_at": self._now(), "lease_until": None}
            row = job_rows.end_for_key(connection, job_id, key.id, over)
            if row is None:
                state = _own(connection, key, job_id).state
                raise HarvestNotCancellable(f"this job is {state} already, which is for good.")
            counters.change(connection, freed(row))
        return _job(row)

    def waiting(self, models: Sequence[str], *, store: str = "", lane: str | None = None) -> int:
        """How many jobs a worker could take just now."""
        with self._database.reading() as connection:
            return job_rows.waiting(connection, Reach(models, store, lane), self._now())

    def claim(
        self,
        worker: str,
        models: Sequence[str],
        *,
        store: str = "",
        lane: str | None = None,
        loaded: str | None = None,
    ) -> Job | None:
        """Take the next job for ``worker``, or None where there is none.

        It is the oldest, but one of the model that is ``loaded`` comes before others that have not waited long. A job
        that several workers in a row took without finishing a shard fails instead.
        """
        reach, at = Reach(models, store, lane), self._now()
        urgent = at - timedelta(seconds=_URGENT_SECONDS)
        with self._database.writing() as connection:
            while row := job_rows.lock_next(connection, reach, at, loaded=loaded, urgent_before=urgent):
                if row.attempts < MOST_ATTEMPTS:
                    return _job(self._taken(connection, row, worker, at))
                self._give_up(connection, row, at)
        return None

    def beat(
        self, job_id: str, worker: str, prompts_done: int = 0, shards_done: int = 0, *, seconds: float = 0.0
    ) -> Word:
        """Say that ``worker`` lives, what it has done and how long it worked since it last said so.

        ``"cancel"``: the key ended the job; ``"lost"``: another worker has it, or it is over. Either way, stop.
        """
        told = {"prompts_done": prompts_done, "shards_done": shards_done, "worked_seconds": seconds}
        with self._database.writing() as connection:
            lease = {"lease_until": self._now() + self._lease}
            if job_rows.beat(connection, job_id, worker, {**told, **lease}) is not None:
                return "go"
            row = job_rows.get(connection, job_id)
        return "cancel" if row is not None and row.state == "cancelled" else "lost"

    def done(self, job_id: str, worker: str, timings: Mapping[str, float] | None = None) -> bool:
        """The run is whole. False, here and below: ``worker`` does not have the job any more, and nothing changed."""
        told = {"state": "done", "timings": json.dumps(dict(timings or {}))}
        return self._end(job_id, worker, told, refund=False)

    def failed(self, job_id: str, worker: str, error: JobError, *, refund: bool) -> bool:
        """The job cannot be done; ``refund`` where that is the server's fault and not the caller's."""
        told = {"state": "failed", "error_code": error.code, "error_message": error.message}
        return self._end(job_id, worker, told, refund=refund)

    def let_go(self, job_id: str, worker: str) -> bool:
        """The worker was told to stop: the job waits again, and goes on where it stands."""
        with self._database.writing() as connection:
            row = job_rows.change_held(connection, job_id, worker, {"worker": worker})
            if row is None:
                return False
            free = {"state": "pending", "worker": None, "lease_until": None, "ready_at": self._now()}
            # It was not the job that ended this attempt.
            job_rows.change(connection, job_id, {**free, "attempts": max(0, row.attempts - 1)})
        return True

    def put_off(self, job_id: str, worker: str, error: JobError) -> bool:
        """Something failed that may pass: the job waits for a while, or fails where that was tried often enough."""
        at = self._now()
        with self._database.writing() as connection:
            row = job_rows.change_held(connection, job_id, worker, {"worker": worker})
            if row is None:
                return False
            if row.attempts >= MOST_ATTEMPTS:
                told = {"state": "failed", "error_code": error.code, "error_message": error.message}
                self._over(connection, row, told, at, refund=True)
                return True
            later = at + timedelta(seconds=_FIRST_DELAY_SECONDS * 2 ** max(0, row.attempts - 1))
            free = {"state": "pending", "worker": None, "lease_until": None, "ready_at": later}
            job_rows.change(connection, job_id, free)
        return True

    def worker_ended(self, worker: str) -> int:
        """A worker is no more: its jobs are free at once. How many it had."""
        with self._database.writing() as connection:
            return job_rows.drop_leases(connection, worker, self._now())

    def fail_forgotten(self, *, days: float) -> int:
        """Fail jobs that no worker took for so long, as of a model or store that is no more; how many there were."""
        at, count = self._now(), 0
        reason = f"no worker took this job in {days:g} days; its model may not be served any more. Nothing was charged."
        told = {"state": "failed", "error_code": HarvestUnavailable.code, "error_message": reason}
        with self._database.writing() as connection:
            while row := job_rows.lock_forgotten(connection, at - timedelta(days=days)):
                self._over(connection, row, told, at, refund=True)
                count += 1
        return count

    def to_clear(self, *, store: str, keep_days: float, grace_seconds: float) -> list[Job]:
        """Jobs whose files are to be removed: old ones, and those that came to nothing ``grace_seconds`` ago."""
        at = self._now()
        done, ended = at - timedelta(days=keep_days), at - timedelta(seconds=grace_seconds)
        with self._database.reading() as connection:
            rows = job_rows.to_clear(connection, store, done_before=done, ended_before=ended, limit=_LISTED)
        return [_job(row) for row in rows]

    def cleared(self, job_id: str) -> None:
        """The job's files were removed."""
        with self._database.writing() as connection:
            job_rows.change(connection, job_id, {"cleared_at": self._now()})

    def under_way(self, *, store: str) -> list[Job]:
        """Jobs that wait or run, the oldest first."""
        with self._database.reading() as connection:
            return [_job(row) for row in job_rows.under_way(connection, store)]

    def _taken(self, connection: Connection, row: Row[Any], worker: str, at: datetime) -> Row[Any]:
        held = {"state": "running", "worker": worker, "lease_until": at + self._lease, "attempts": row.attempts + 1}
        return job_rows.change(connection, row.id, {**held, "started_at": row.started_at or at})

    def _give_up(self, connection: Connection, row: Row[Any], at: datetime) -> None:
        reason = f"{row.attempts} workers took this job one after the other and ended before one more shard was whole."
        told = {"state": "failed", "error_code": EngineDead.code, "error_message": reason}
        self._over(connection, row, told, at, refund=True)

    def _end(self, job_id: str, worker: str, told: dict[str, Any], *, refund: bool) -> bool:
        with self._database.writing() as connection:
            row = job_rows.change_held(connection, job_id, worker, {"worker": worker})
            if row is None:
                return False
            if told["state"] == "done":
                told = {**told, "prompts_done": row.n_prompts, "shards_done": row.n_shards}
            self._over(connection, row, told, self._now(), refund=refund)
        return True

    def _over(self, connection: Connection, row: Row[Any], told: dict[str, Any], at: datetime, *, refund: bool) -> None:
        job_rows.change(connection, row.id, {**told, "completed_at": at, "lease_until": None, "worker": None})
        counters.change(connection, {**freed(row), **(refunded(row) if refund else {})})


def _own(connection: Connection, key: KeyRecord, job_id: str) -> Row[Any]:
    row = job_rows.get(connection, job_id)
    if row is None or row.key_id != key.id:
        raise HarvestNotFound("there is no harvest job of that id for this key.")
    return row


def _whose(key: KeyRecord) -> dict[str, Any]:
    return {"key_id": key.id, "user": key.user}


def _row(asked: JobAsked) -> dict[str, Any]:
    names = ("id", "run_id", "model", "lane", "n_prompts", "n_tokens", "n_shards")
    layers = ",".join(str(layer) for layer in asked.layer_indices)
    return {**{name: getattr(asked, name) for name in names}, "layer_indices": layers}


def _job(row: Row[Any]) -> Job:
    return Job(
        **{name: getattr(row, name) for name in _SAME},
        layer_indices=tuple(int(layer) for layer in row.layer_indices.split(",") if layer),
        error=None if row.error_code is None else JobError(row.error_code, row.error_message or ""),
        timings=json.loads(row.timings),
        files_kept=row.cleared_at is None,
    )
