"""/v1/harvest and /v1/harvest/{job_id}: submit bulk jobs, list them, look at one or wait for it, cancel it."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamtap.errors import HarvestNotFound, StreamtapError
from streamtap.server.answering import Answering
from streamtap.server.harvests import answers, checks
from streamtap.server.harvests.answers import Kept
from streamtap.server.harvests.jobs import Job, JobAsked
from streamtap.server.harvests.signing import Links
from streamtap.server.harvests.waiting import Waiters, until_over, wait_seconds
from streamtap.server.service import Service
from streamtap.server.surface.bodies import presented_key, read_limited
from streamtap.server.surface.outside import base_url
from streamtap.server.surface.reply import Reply
from streamtap.server.surface.trace import trace_of
from streamtap.wire.harvest import read_harvest
from streamtap.wire.harvest_jobs import job_object, submitted_object
from streamtap.wire.reading import write_json

if TYPE_CHECKING:
    from streamtap.server.ledger.keys import KeyRecord

SCOPE = "harvest"
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Prompts as Python has them take many times the bytes of the body, and seconds to count: of large bodies one is read
#: at a time, so that of the two threads that do it one is there for completions.
_LARGE_BYTES = 1024 * 1024
#: When a client whose wait was declined may look again, in seconds.
_RETRY_SECONDS = 5
_DECLINED = ((b"x-streamtap-longpoll", b"declined"), (b"retry-after", str(_RETRY_SECONDS).encode()))


class HarvestJobs:
    """POST and GET /v1/harvest."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._large = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        act = self._submit if scope["method"] == "POST" else self._every
        response = await act(Request(scope, receive))
        await response(scope, receive, send)

    async def _every(self, request: Request) -> Response:
        key = await _key_of(request, self._service)
        jobs = await self._service.harvests.jobs(key)
        return _json({"object": "list", "data": [job_object(answers.brief(job)) for job in jobs]})

    async def _submit(self, request: Request) -> Response:
        trace, admission = trace_of(request.scope), self._service.admission
        async with await admission.admit(presented_key(request.scope["headers"]), trace, scope=SCOPE) as account:
            asked, raw = await self._checked(request, account.ticket.key)
            if await request.is_disconnected():
                # Whoever gave up on a long count sends it again, and that is to be one job.
                raise ClientDisconnect
            job = await self._service.harvests.submit(account.ticket.key, asked, raw)
            await account.took_on(job.n_tokens)
        return _json(submitted_object(answers.brief(job)), 202)

    async def _checked(self, request: Request, key: KeyRecord) -> tuple[JobAsked, bytes]:
        """What the job will be, and its body."""
        raw = await read_limited(request.scope, request.receive, self._service.config.limits.max_body_bytes)
        if len(raw) <= _LARGE_BYTES:
            return await self._counted(request, key, raw), raw
        async with self._large:
            return await self._counted(request, key, raw), raw

    async def _counted(self, request: Request, key: KeyRecord, raw: bytes) -> JobAsked:
        """The order of these checks is part of the contract."""
        service, limits = self._service, self._service.config.limits
        told = await service.read(len(raw), read_harvest, raw)
        found = checks.choose_model(told, service.catalog)
        trace_of(request.scope).model = found.config.id
        checks.check_fits(told, found, limits)
        await service.harvests.check_room(key, found.config.size)
        return await service.read(len(raw), checks.count, told, found, limits)


class HarvestJob:
    """GET and DELETE /v1/harvest/{job_id}: plain ASGI, for one that waits must be kept alive, and seen to leave."""

    def __init__(self, service: Service, links: Links) -> None:
        self._service = service
        self._links = links
        self._kept = Kept.of(service.config.harvest)
        self._waiters = Waiters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        key = await _key_of(request, self._service)
        job_id = _job_id(request)
        if scope["method"] == "DELETE":
            response = _json(job_object(answers.brief(await self._service.harvests.cancel(key, job_id))))
            await response(scope, receive, send)
            return
        seconds = wait_seconds(request.query_params.get("wait"))
        job = await self._service.harvests.job(key, job_id)
        trace_of(scope).model = job.model
        if seconds and not job.is_over:
            await self._waited(request, key, job, seconds, send)
        else:
            response = _json(await self._shown(request, job))
            await response(scope, receive, send)

    async def _waited(self, request: Request, key: KeyRecord, job: Job, seconds: float, send: Send) -> None:
        with self._waiters.waiting(key.id) as free:
            if not free:
                response = _json(await self._shown(request, job))
                response.raw_headers.extend(_DECLINED)
                await response(request.scope, request.receive, send)
                return
            await self._patiently(request, key, job, seconds, send)

    async def _patiently(self, request: Request, key: KeyRecord, job: Job, seconds: float, send: Send) -> None:
        """Answer once the job is over or the time is, and keep the connection alive until then."""
        service, trace = self._service, trace_of(request.scope)
        reply = Reply(send, trace, clock=service.clock, timing=service.config.timing)
        answering = Answering(reply, started=trace.started, clock=service.clock, timing=service.config.timing)
        # The deadline of an answer is for engines; nobody who waits for a job is to hear of it.
        longest = min(seconds, service.config.timing.deadline_seconds / 2)

        async def work() -> None:
            last = await until_over(
                partial(service.harvests.job, key, job.id),
                longest,
                service.clock,
                hurried=lambda: service.stopping.begun,
            )
            await reply.finish(write_json(await self._shown(request, last)))

        try:
            await answering.run(work, request.receive, service.stopping)
        except StreamtapError as error:
            await reply.fail(error)

    async def _shown(self, request: Request, job: Job) -> dict[str, Any]:
        """The job with its links, if it has any; signing may take a while."""
        now, base = self._service.clock.now(), base_url(request.scope)
        return job_object(await run_in_threadpool(answers.full, job, self._links, self._kept, now=now, base=base))


async def _key_of(request: Request, service: Service) -> KeyRecord:
    key = await service.admission.authenticate(presented_key(request.scope["headers"]), SCOPE)
    trace_of(request.scope).key_prefix = key.prefix
    return key


def _job_id(request: Request) -> str:
    """The id that the address names.

    Raises:
        HarvestNotFound: no job has such an id.
    """
    found: str = request.path_params["job_id"]
    if not _JOB_ID.fullmatch(found):
        raise HarvestNotFound("there is no harvest job of that id for this key.")
    return found


def _json(body: Any, status: int = 200) -> Response:
    return Response(write_json(body), status, media_type="application/json")
