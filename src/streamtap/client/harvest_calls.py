"""The endpoints of bulk harvests, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from streamtap.client.answers import TAKEN, Answer, read_mapping, read_object, retry_after
from streamtap.client.bodies import encoded
from streamtap.client.calls import Call, read_list
from streamtap.client.harvest_bodies import JobPrompt
from streamtap.client.transport import in_doubt
from streamtap.errors import (
    EngineFailed,
    HarvestCapacityExceeded,
    HarvestConcurrencyExceeded,
    HarvestNotFound,
    InvalidInput,
    TransferFailed,
)
from streamtap.harvested.manifest import NAME, STATS_NAME
from streamtap.wire.harvest_jobs import JobView, read_job

#: Refusals that end when a job ends.
NO_SLOT = (HarvestConcurrencyExceeded, HarvestCapacityExceeded)
#: The longest that a server holds a poll.
LONGEST_POLL_SECONDS = 60

_DECLINED_SECONDS = 5


@dataclass(frozen=True)
class Looked:
    """A job as the server told of it; ``declined_seconds`` is how long to wait where it did not hold the poll."""

    job: JobView
    declined_seconds: int | None = None


def submit_call(
    fields: Mapping[str, Any], prompts: Sequence[JobPrompt], at_once: tuple[Any, ...] = ()
) -> Call[JobView]:
    """One job; asked twice it would be two.

    Raises:
        InvalidInput: what JSON cannot say.
    """

    def read(answer: Answer) -> JobView:
        try:
            return _job(answer)
        except TransferFailed as error:
            raise in_doubt(error) from error
        except EngineFailed as error:
            # Submitting asks no engine: whatever stands between gave up on a server that may have taken the job.
            raise in_doubt(TransferFailed(str(error))) from error

    body = encoded({**fields, "prompts": prompts})
    return Call("POST", "/harvest", read, body, repeatable=False, at_once=at_once)


def job_call(job_id: str, wait_seconds: int = 0) -> Call[Looked]:
    """Where a job stands; with ``wait_seconds`` the answer comes when it ends, or after so long."""
    query = f"?wait={wait_seconds}" if wait_seconds else ""

    def read(answer: Answer) -> Looked:
        declined = answer.headers.get("x-streamtap-longpoll", "").strip().lower() == "declined"
        seconds = (retry_after(answer.headers) or _DECLINED_SECONDS) if declined else None
        return Looked(_job(answer), seconds)

    return Call("GET", _path(job_id) + query, read)


def cancel_call(job_id: str) -> Call[JobView]:
    """End a job."""
    return Call("DELETE", _path(job_id), _job)


def jobs_call() -> Call[list[JobView]]:
    """The newest jobs of the key."""
    return Call("GET", "/harvest", lambda answer: [_checked(each) for each in read_list(answer)])


def links_of(job: JobView, base: str) -> dict[str, str]:
    """The files of a job that is done, by name, each with its signed link; ``base`` is what a relative one hangs on.

    Raises:
        InvalidInput: it is not over.
        HarvestNotFound: its files are kept no longer.
    """
    if not job.is_over:
        raise InvalidInput(f"harvest {job.job_id} is {job.status}; its files come when it is done: wait() for it.")
    if (result := job.result) is None:
        raise HarvestNotFound(f"harvest {job.job_id} is {job.status} and has no files, or they are kept no longer.")
    told = {NAME: result.manifest_url, STATS_NAME: result.stats_url}
    told |= {_name(url): url for url in result.shard_urls}
    return {name: urljoin(f"{base}/", url) for name, url in told.items()}


def _path(job_id: str) -> str:
    if not isinstance(job_id, str) or not job_id.strip():
        raise InvalidInput("a harvest is named by the id that it got when it was submitted.")
    return f"/harvest/{quote(job_id.strip(), safe='')}"


def _name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])


def _job(answer: Answer) -> JobView:
    # The job that failed has an error of its own, which is no refusal.
    found = read_object(answer.body) if answer.status in TAKEN else None
    return _checked(found if found is not None and "job_id" in found else read_mapping(answer))


def _checked(found: Mapping[str, Any]) -> JobView:
    try:
        return read_job(found)
    except InvalidInput as error:
        raise TransferFailed(f"{error} Is the address this service's?") from error
