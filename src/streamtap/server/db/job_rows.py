"""Rows of ``harvest_jobs``. A transaction locks its job before any counter; a state that is over never changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, case, func, insert, or_, select, update

from streamtap.server.db.tables import harvest_jobs

_JOBS = harvest_jobs.c
_UNDER_WAY = ("pending", "running")
_ADDED = {"state": "pending", "attempts": 0, "prompts_done": 0, "shards_done": 0, "worked_seconds": 0.0}


class Reach(NamedTuple):
    """Which jobs a worker can do: of these models, of this lane (any where it is None), with files in this store."""

    models: Sequence[str]
    store: str
    lane: str | None


def add(connection: Connection, values: Mapping[str, Any]) -> None:
    """Write a new job, which waits."""
    connection.execute(insert(harvest_jobs), {**_ADDED, "timings": "{}", **values})


def get(connection: Connection, job_id: str) -> Row[Any] | None:
    """The job of that id."""
    return connection.execute(select(harvest_jobs).where(_JOBS.id == job_id)).first()


def of_key(connection: Connection, key_id: int, limit: int) -> Sequence[Row[Any]]:
    """The newest jobs of a key, the newest first."""
    newest = select(harvest_jobs).where(_JOBS.key_id == key_id).order_by(_JOBS.created_at.desc(), _JOBS.id).limit(limit)
    return connection.execute(newest).all()


def waiting(connection: Connection, reach: Reach, at: datetime) -> int:
    """How many jobs a worker could take just now."""
    found = select(func.count()).select_from(harvest_jobs).where(_free(reach, at))
    return connection.execute(found).scalar_one()


def lock_next(
    connection: Connection, reach: Reach, at: datetime, *, loaded: str | None, urgent_before: datetime
) -> Row[Any] | None:
    """The job to take next, which nobody else takes until the transaction ends; None where there is none.

    The oldest, but those of the model ``loaded`` come before others that were asked for after ``urgent_before``.
    """
    turn = case((_JOBS.created_at < urgent_before, 0), (_JOBS.model == (loaded or ""), 1), else_=2)
    found = select(harvest_jobs).where(_free(reach, at)).order_by(turn, _JOBS.created_at, _JOBS.id).limit(1)
    return connection.execute(found.with_for_update(skip_locked=True)).first()


def change(connection: Connection, job_id: str, values: Mapping[str, Any]) -> Row[Any]:
    """Write into a job that this transaction has locked, and give it as it is then."""
    return connection.execute(_update(values).where(_JOBS.id == job_id)).one()


def change_held(connection: Connection, job_id: str, worker: str, values: Mapping[str, Any]) -> Row[Any] | None:
    """Write into a job that ``worker`` has, and give it as it is then; None where the worker lost it, or it is over."""
    held = (_JOBS.id == job_id) & (_JOBS.state == "running") & (_JOBS.worker == worker)
    return connection.execute(_update(values).where(held)).first()


def beat(connection: Connection, job_id: str, worker: str, values: Mapping[str, Any]) -> Row[Any] | None:
    """As ``change_held``; what was done never grows less, and a new shard clears ``attempts``."""
    told = dict(values)
    prompts, shards = told.pop("prompts_done"), told.pop("shards_done")
    told["attempts"] = case((_JOBS.shards_done < shards, 0), else_=_JOBS.attempts)
    told["prompts_done"] = case((_JOBS.prompts_done < prompts, prompts), else_=_JOBS.prompts_done)
    told["shards_done"] = case((_JOBS.shards_done < shards, shards), else_=_JOBS.shards_done)
    told["worked_seconds"] = _JOBS.worked_seconds + told["worked_seconds"]
    return change_held(connection, job_id, worker, told)


def end_for_key(connection: Connection, job_id: str, key_id: int, values: Mapping[str, Any]) -> Row[Any] | None:
    """Write into a job of a key that is not over; None where there is none."""
    live = (_JOBS.id == job_id) & (_JOBS.key_id == key_id) & _JOBS.state.in_(_UNDER_WAY)
    return connection.execute(_update(values).where(live)).first()


def drop_leases(connection: Connection, worker: str, at: datetime) -> int:
    """Let the leases of a worker that is no more run out; how many it had."""
    held = (_JOBS.state == "running") & (_JOBS.worker == worker)
    return connection.execute(update(harvest_jobs).where(held).values(lease_until=at)).rowcount


def to_clear(
    connection: Connection, store: str, *, done_before: datetime, ended_before: datetime, limit: int
) -> Sequence[Row[Any]]:
    """Jobs whose files are kept no longer: done before the one time, or failed or cancelled before the other."""
    old = or_(
        (_JOBS.state == "done") & (_JOBS.completed_at < done_before),
        _JOBS.state.in_(("failed", "cancelled")) & (_JOBS.completed_at < ended_before),
    )
    found = select(harvest_jobs).where(_JOBS.store == store, _JOBS.cleared_at.is_(None), old)
    return connection.execute(found.order_by(_JOBS.completed_at).limit(limit)).all()


def lock_forgotten(connection: Connection, before: datetime) -> Row[Any] | None:
    """A job that could have been taken since ``before`` and was not; nobody else takes it now."""
    found = select(harvest_jobs).where(_takeable(before)).order_by(_JOBS.ready_at).limit(1)
    return connection.execute(found.with_for_update(skip_locked=True)).first()


def under_way(connection: Connection, store: str) -> Sequence[Row[Any]]:
    """Jobs that are not over."""
    return connection.execute(
        select(harvest_jobs).where(_JOBS.store == store, _JOBS.state.in_(_UNDER_WAY)).order_by(_JOBS.created_at)
    ).all()


def _takeable(at: datetime) -> ColumnElement[bool]:
    return or_(
        (_JOBS.state == "pending") & (_JOBS.ready_at <= at), (_JOBS.state == "running") & (_JOBS.lease_until <= at)
    )


def _free(reach: Reach, at: datetime) -> ColumnElement[bool]:
    mine = (_JOBS.store == reach.store) & _JOBS.model.in_(list(reach.models)) & _takeable(at)
    return mine if reach.lane is None else mine & (_JOBS.lane == reach.lane)


def _update(values: Mapping[str, Any]) -> Any:
    return update(harvest_jobs).values(dict(values)).returning(harvest_jobs)
