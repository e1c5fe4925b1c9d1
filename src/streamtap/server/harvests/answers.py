"""What a job's owner is told of it: its state, where its time went, and, once it is done, links to its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self

from streamtap.errors import StreamtapError
from streamtap.harvest.sealing import shard_key
from streamtap.harvested.manifest import NAME, STATS_NAME
from streamtap.server.config import HarvestConfig
from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.signing import Links
from streamtap.wire.errors import read_error
from streamtap.wire.harvest_jobs import Accounting, HarvestResult, JobView


@dataclass(frozen=True)
class Kept:
    """How long links last, and files, which end them earlier; without ``files_for`` files stay."""

    links_for: timedelta = timedelta(days=7)
    files_for: timedelta | None = None

    @classmethod
    def of(cls, config: HarvestConfig) -> Self:
        """As the configuration says."""
        return cls(timedelta(days=config.link_days), timedelta(days=config.keep_days))

    def until(self, job: Job, now: datetime) -> datetime | None:
        """When links that are signed now expire; None where the files are no more."""
        at = now + self.links_for
        if self.files_for is not None and job.completed_at is not None:
            at = min(at, job.completed_at + self.files_for)
        return at if job.files_kept and at > now else None


def brief(job: Job) -> JobView:
    """A job without its links, as a list has it."""
    return JobView(
        job_id=job.id,
        status=job.state,
        model=job.model,
        n_prompts=job.n_prompts,
        run_id=job.run_id,
        created_at=job.created_at,
        completed_at=job.completed_at,
        prompts_done=job.prompts_done,
        shards_done=job.shards_done,
        accounting=_accounting(job),
        error=_error(job),
    )


def full(job: Job, links: Links, kept: Kept, *, now: datetime, base: str) -> JobView:
    """A job with links to its files, signed now, where it is done and they are kept.

    ``base`` is how the caller reached the gateway, without a path.

    Raises:
        HarvestUnavailable: links cannot be signed just now.
    """
    told = brief(job)
    if job.state != "done" or (until := kept.until(job, now)) is None:
        return told
    shards = [shard_key(number, "none") for number in range(job.n_shards)]
    signed = links.sign(job.run_id, [NAME, STATS_NAME, *shards], expires_at=until, now=now, base=base)
    result = HarvestResult(
        n_shards=job.n_shards,
        layer_indices=job.layer_indices,
        manifest_url=signed[0],
        stats_url=signed[1],
        shard_urls=tuple(signed[2:]),
        timings=job.timings,
    )
    return replace(told, result=result, urls_expire_at=until)


def _accounting(job: Job) -> Accounting | None:
    if job.completed_at is None:
        return None
    wall = max(0.0, (job.completed_at - job.created_at).total_seconds())
    inside = min(job.worked_seconds, wall)
    return Accounting(round(wall, 3), round(inside, 3), round(wall - inside, 3))


def _error(job: Job) -> StreamtapError | None:
    if job.error is None:
        return None
    return read_error({"error": {"code": job.error.code, "message": job.error.message}}, 500)
