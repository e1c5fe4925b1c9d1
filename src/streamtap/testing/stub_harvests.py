"""A server of bulk harvests without HTTP or a model: real bodies, real files, links that end when a test says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from streamtap.errors import (
    HarvestConcurrencyExceeded,
    HarvestNotCancellable,
    HarvestNotFound,
    InvalidKey,
    ModelNotFound,
    RequestTooLarge,
    StreamtapError,
)
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.manifest import NAME, STATS_NAME
from streamtap.harvested.opening import open_place
from streamtap.server.harvests.asking import ask_of
from streamtap.testing.fake_engine import FakeEngine
from streamtap.wire.errors import error_body
from streamtap.wire.harvest import HarvestRequest, read_harvest
from streamtap.wire.harvest_jobs import HarvestResult, JobView, job_object, submitted_object

KEY = "stp_abcdefgh_secret"
MODEL = "stub"

_STATUS: dict[type[StreamtapError], int] = {
    HarvestConcurrencyExceeded: 429,
    HarvestNotCancellable: 409,
    HarvestNotFound: 404,
    InvalidKey: 401,
    RequestTooLarge: 413,
}
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Reply(NamedTuple):
    """What is sent back."""

    status: int
    headers: dict[str, str]
    body: bytes


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class StubHarvests:
    """Answers as the service does. A job runs through a ``FakeEngine`` at the ``looks``-th look at it.

    Args:
        folder: Where the files of runs go.
        api: Address of the service, without ``/v1``.
        files: Where links lead; another server, as an object store is.
        slots: Jobs of the key at once.
        most_prompts: In a job.
        most_tokens: In a job.
        looks: How often a job is asked after before it is done.
        broken: The message of an error that every job fails with.
        before: Called with each request; what it returns is sent instead.
    """

    folder: Path
    api: str = "http://server"
    files: str = "http://files"
    slots: int = 3
    most_prompts: int = 4096
    most_tokens: int = 2_000_000
    looks: int = 1
    broken: str | None = None
    before: Callable[[Asked], Reply | None] | None = None
    engine: FakeEngine = field(default_factory=FakeEngine)
    asked: list[Asked] = field(default_factory=list)
    requests: dict[str, HarvestRequest] = field(default_factory=dict)
    jobs: dict[str, JobView] = field(default_factory=dict)
    signed: int = 0
    _looked: dict[str, int] = field(default_factory=dict)

    def end_links(self) -> None:
        """Refuse every link that was signed so far."""
        self.signed += 1

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """What the service, or whoever keeps the files, says to a request."""
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        asked = Asked(method, parts.path, query, {name.lower(): value for name, value in headers.items()})
        self.asked.append(asked)
        if self.before is not None and (reply := self.before(asked)) is not None:
            return reply
        if parts.path.startswith("/files/"):
            return self._file(asked)
        try:
            return self._service(asked, body)
        except StreamtapError as error:
            status = next((each for kind, each in _STATUS.items() if isinstance(error, kind)), 400)
            return Reply(status, {"content-type": "application/json"}, error_body(error, "r-1"))

    def _service(self, asked: Asked, body: bytes) -> Reply:
        if asked.headers.get("authorization") != f"Bearer {KEY}":
            raise InvalidKey("the key is not known.")
        if asked.path == "/v1/models":
            return _json({"object": "list", "data": [self._model()]})
        if asked.path == "/v1/harvest" and asked.method == "POST":
            return _json(submitted_object(self._submitted(read_harvest(body))), 202)
        if asked.path == "/v1/harvest":
            jobs = [replace(job, result=None, urls_expire_at=None) for job in reversed(self.jobs.values())]
            return _json({"object": "list", "data": [job_object(job) for job in jobs]})
        job_id = asked.path.rpartition("/")[2]
        if job_id not in self.jobs:
            raise HarvestNotFound("there is no harvest job of that id for this key.")
        if asked.method == "DELETE":
            return _json(job_object(self._cancelled(job_id)))
        return _json(job_object(self._seen(job_id)))

    def _model(self) -> dict[str, Any]:
        told = {"n_layers": self.engine.n_layers, "max_model_len": self.engine.context_tokens}
        return {"id": MODEL, "object": "model", "capabilities": told}

    def _submitted(self, request: HarvestRequest) -> JobView:
        if request.model != MODEL:
            raise ModelNotFound(f"there is no model {request.model}; there is {MODEL}.")
        request.check_fits(n_layers=self.engine.n_layers, hidden=self.engine.hidden)
        if len(request.prompts) > self.most_prompts or self._tokens(request) > self.most_tokens:
            raise RequestTooLarge("the job has more prompts or tokens than one may have.")
        if sum(not job.is_over for job in self.jobs.values()) >= self.slots:
            error = HarvestConcurrencyExceeded("all slots of the lane small are taken.")
            error.retry_after_seconds = 30
            raise error
        number = len(self.jobs)
        job = JobView(f"job-{number}", "pending", MODEL, len(request.prompts), f"run-{number}", created_at=_MOMENT)
        self.jobs[job.job_id], self.requests[job.job_id], self._looked[job.job_id] = job, request, 0
        return job

    def _seen(self, job_id: str) -> JobView:
        """The job after one more look at it."""
        job = self.jobs[job_id]
        if not job.is_over:
            self._looked[job_id] += 1
            done = job.n_prompts * self._looked[job_id] // (self.looks + 1)
            job = replace(job, status="running", prompts_done=done)
            if self._looked[job_id] >= self.looks:
                job = self._ended(job)
            self.jobs[job_id] = job
        if job.result is None:
            return job
        return replace(job, result=self._links(job, job.result.n_shards), urls_expire_at=_MOMENT)

    def _ended(self, job: JobView) -> JobView:
        if self.broken is not None:
            failure = StreamtapError(self.broken)
            return replace(job, status="failed", completed_at=_MOMENT, error=failure)
        request = self.requests[job.job_id]
        manifest = run_harvest(
            self.engine,
            read_prompts(request.prompts, self.engine.tokenizer, add_special_tokens=request.add_special_tokens),
            open_place(self.folder / str(job.run_id)),
            ask_of(request),
            spool=self.folder / f"{job.run_id}-spool",
            run_id=job.run_id,
        )
        return replace(
            job,
            status="done",
            completed_at=_MOMENT,
            prompts_done=job.n_prompts,
            shards_done=len(manifest.shards),
            result=self._links(job, len(manifest.shards)),
        )

    def _cancelled(self, job_id: str) -> JobView:
        if self.jobs[job_id].is_over:
            raise HarvestNotCancellable(f"job {job_id} is {self.jobs[job_id].status} already.")
        self.jobs[job_id] = replace(self.jobs[job_id], status="cancelled", completed_at=_MOMENT)
        return self.jobs[job_id]

    def _tokens(self, request: HarvestRequest) -> int:
        prompts = read_prompts(request.prompts, self.engine.tokenizer, add_special_tokens=request.add_special_tokens)
        return sum(len(each.token_ids) for each in prompts)

    def _links(self, job: JobView, n_shards: int) -> HarvestResult:
        shards = tuple(self._link(job, f"shard_{number:05d}.safetensors") for number in range(n_shards))
        layers = ask_of(self.requests[job.job_id]).layer_indices(self.engine.n_layers)
        return HarvestResult(n_shards, layers, self._link(job, NAME), shards, self._link(job, STATS_NAME))

    def _link(self, job: JobView, name: str) -> str:
        return f"{self.files}/files/{job.run_id}/{name}?signature=secret-{self.signed}"

    def _file(self, asked: Asked) -> Reply:
        if "authorization" in asked.headers:
            return Reply(400, {}, b"a link and a key")
        if asked.query.get("signature") != f"secret-{self.signed}":
            return Reply(403, {}, b"the link has expired")
        file = self.folder / asked.path.removeprefix("/files/")
        if not file.is_file():
            return Reply(404, {}, b"no such file")
        data = file.read_bytes()
        if (wanted := _RANGE.fullmatch(asked.headers.get("range", ""))) is None:
            return Reply(200, {"accept-ranges": "bytes"}, data)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            return Reply(416, {"content-range": f"bytes */{len(data)}"}, b"")
        return Reply(206, {"content-range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop])


def _json(document: Mapping[str, Any], status: int = 200) -> Reply:
    return Reply(status, {"content-type": "application/json"}, json.dumps(document).encode())
