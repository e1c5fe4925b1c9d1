"""A harvest job as it stands in a body, both ways: what the server says of one, and what a client reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from streamtap.errors import InvalidInput, StreamtapError
from streamtap.wire.errors import error_document, read_error

JobState = Literal["pending", "running", "done", "failed", "cancelled"]
STATES: tuple[str, ...] = get_args(JobState)
#: States that never change again.
OVER: tuple[str, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class HarvestResult:
    """Where the files of a job that is done lie: links that need no key.

    ``timings`` are seconds, by what took them.
    """

    n_shards: int
    layer_indices: tuple[int, ...]
    manifest_url: str
    shard_urls: tuple[str, ...]
    stats_url: str
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Accounting:
    """Where a job's time went, in seconds: from submission to its end, of these in workers' hands, and the rest."""

    wall_clock_s: float
    in_container_s: float
    unaccounted_s: float


@dataclass(frozen=True)
class JobView:
    """One job as ``GET /v1/harvest/{job_id}`` tells it; times are in UTC.

    ``accounting`` is there once it is over, ``error`` when it failed, and ``result`` and ``urls_expire_at`` when it is
    done, as long as its files are kept.
    """

    job_id: str
    status: JobState
    model: str
    n_prompts: int
    run_id: str | None = None
    created_at: datetime | None = None
    completed_at: datetime | None = None
    prompts_done: int = 0
    shards_done: int = 0
    result: HarvestResult | None = None
    urls_expire_at: datetime | None = None
    accounting: Accounting | None = None
    error: StreamtapError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in OVER


def submitted_object(view: JobView) -> dict[str, Any]:
    """What a job is answered with when it was taken."""
    return {"job_id": view.job_id, "status": view.status, "model": view.model, "n_prompts": view.n_prompts}


def job_object(view: JobView) -> dict[str, Any]:
    """A job as JSON; what is not known yet is left out, but for ``completed_at``."""
    told: dict[str, Any] = {
        **submitted_object(view),
        "run_id": view.run_id,
        "created_at": _stamp(view.created_at),
        "completed_at": _stamp(view.completed_at),
        "progress": {"prompts_done": view.prompts_done, "shards_done": view.shards_done},
    }
    if view.result is not None:
        told["result"] = _result_object(view.result)
        told["urls_expire_at"] = _stamp(view.urls_expire_at)
    if view.accounting is not None:
        told["accounting"] = asdict(view.accounting)
    if view.error is not None:
        told["error"] = error_document(view.error, None)["error"]
    return told


def read_job(body: Any) -> JobView:
    """The job that a server tells of; of what it adds beside the contract nothing is kept.

    Raises:
        InvalidInput: this is no job.
    """
    try:
        return _job(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"the server's answer is not a harvest job ({type(error).__name__}).") from error


def _job(body: Mapping[str, Any]) -> JobView:
    if body["status"] not in STATES:
        raise ValueError("no such state")
    progress, result, error = body.get("progress") or {}, body.get("result"), body.get("error")
    return JobView(
        job_id=str(body["job_id"]),
        status=body["status"],
        model=str(body["model"]),
        n_prompts=int(body["n_prompts"]),
        run_id=body.get("run_id"),
        created_at=_moment(body.get("created_at")),
        completed_at=_moment(body.get("completed_at")),
        prompts_done=int(progress.get("prompts_done", 0)),
        shards_done=int(progress.get("shards_done", 0)),
        result=None if result is None else _result(result),
        urls_expire_at=_moment(body.get("urls_expire_at")),
        accounting=_accounting(body.get("accounting")),
        error=None if error is None else read_error({"error": error}, 500),
    )


def _result_object(result: HarvestResult) -> dict[str, Any]:
    return {
        "n_shards": result.n_shards,
        "layer_indices": list(result.layer_indices),
        "manifest_url": result.manifest_url,
        "shard_urls": list(result.shard_urls),
        "stats_url": result.stats_url,
        "timings": dict(result.timings),
    }


def _result(told: Mapping[str, Any]) -> HarvestResult:
    return HarvestResult(
        n_shards=int(told["n_shards"]),
        layer_indices=tuple(int(each) for each in told["layer_indices"]),
        manifest_url=str(told["manifest_url"]),
        shard_urls=tuple(str(each) for each in told["shard_urls"]),
        stats_url=str(told["stats_url"]),
        timings=dict(told.get("timings") or {}),
    )


def _accounting(told: Mapping[str, Any] | None) -> Accounting | None:
    if told is None:
        return None
    return Accounting(**{each.name: float(told[each.name]) for each in fields(Accounting)})


def _stamp(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat()


def _moment(told: str | None) -> datetime | None:
    return None if told is None else datetime.fromisoformat(told)
