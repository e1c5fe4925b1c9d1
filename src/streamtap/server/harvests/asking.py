"""``Asking``: bulk jobs as the event loop sees them, from the request to the job row and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from streamtap.errors import HarvestUnavailable, StreamtapError
from streamtap.harvest.asked import HarvestAsk
from streamtap.server.harvests.jobs import Job, JobAsked, Lane
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.log import note
from streamtap.wire.harvest import HarvestRequest

_RETRY_SECONDS = 30
_Result = TypeVar("_Result")


class Workers(Protocol):
    """Whoever starts workers."""

    def available(self, lane: Lane) -> bool:
        """Whether jobs of a lane are taken just now."""
        ...

    def wake(self) -> None:
        """There is a new job."""
        ...


class NoWorkers:
    """Of a gateway that takes no jobs."""

    def available(self, lane: Lane) -> bool:
        """Never."""
        return False

    def wake(self) -> None:
        """Nothing."""


class Asking:
    """What the routes ask of bulk jobs.

    Args:
        harvests: The ledger's side; its calls block, and run where ``call`` runs them.
        call: ``Admission.call``.
        store: Where prompts and files lie.
        workers: Whoever is to do the jobs.
    """

    def __init__(
        self,
        harvests: Harvests,
        call: Callable[..., Awaitable[Any]],
        store: HarvestStore,
        workers: Workers,
    ) -> None:
        self._harvests, self._call = harvests, call
        self._workers = workers
        self.store = store

    async def check_room(self, key: KeyRecord, lane: Lane) -> None:
        """Refuse a job that would be refused in any case just now, before anybody counts its tokens.

        Raises:
            HarvestUnavailable: nothing takes jobs just now.
            LimitReached: as ``Harvests.submit``.
        """
        if not self._workers.available(lane):
            raise _unavailable()
        await self._call(self._harvests.check_room, key, lane)

    async def submit(self, key: KeyRecord, asked: JobAsked, body: bytes) -> Job:
        """Keep the request's ``body`` and take the job on; nothing is kept of one that is refused.

        Raises:
            HarvestUnavailable: nothing takes jobs just now, or the store fails.
            LimitReached: as ``Harvests.submit``.
        """
        if not self._workers.available(asked.lane):
            raise _unavailable()
        await asyncio.to_thread(self._keep, asked.id, body)
        try:
            job: Job = await self._call(self._harvests.submit, key, asked, store=self.store.identity)
        except StreamtapError:
            # After any other failure the row may be there or not: what is left over is removed later.
            await asyncio.to_thread(self._forget, asked.id)
            raise
        self._workers.wake()
        return job

    async def job(self, key: KeyRecord, job_id: str) -> Job:
        """A job of that key.

        Raises:
            HarvestNotFound: there is none.
        """
        found: Job = await self._call(self._harvests.job, key, job_id)
        return found

    async def jobs(self, key: KeyRecord) -> list[Job]:
        """The key's newest jobs, the newest first."""
        found: list[Job] = await self._call(self._harvests.jobs, key)
        return found

    async def cancel(self, key: KeyRecord, job_id: str) -> Job:
        """End a job; its prompts are removed, and its worker stops within seconds.

        Raises:
            HarvestNotFound: there is none.
            HarvestNotCancellable: it is over already.
        """
        job: Job = await self._call(self._harvests.cancel, key, job_id)
        await asyncio.to_thread(self._forget, job_id)
        return job

    def _forget(self, job_id: str) -> None:
        # A store that fails just now leaves it to the next tidying, and the caller's job is settled all the same.
        with suppress(StreamtapError):
            self.store.remove_input(job_id)

    def _keep(self, job_id: str, body: bytes) -> None:
        try:
            self.store.put_input(job_id, body)
        except StreamtapError as error:
            # Whatever is wrong with the store, it is no mistake of the caller's; our texts hold nothing of a body.
            note("harvest_not_kept", code=error.code, detail=str(error))
            raise _unavailable() from error


def _unavailable() -> HarvestUnavailable:
    error = HarvestUnavailable("nothing here takes harvest jobs just now; try again later.")
    error.retry_after_seconds = _RETRY_SECONDS
    return error


def ask_of(request: HarvestRequest) -> HarvestAsk:
    """What a request keeps of its prompts, as the harvest itself has it.

    Raises:
        InvalidInput: it cannot be.
    """
    layers = request.layers
    return HarvestAsk(
        layers=list(layers) if isinstance(layers, tuple) else layers,
        positions=list(request.positions) if isinstance(request.positions, tuple) else request.positions,
        pooling=request.pooling,
        projection=request.projection,
        add_special_tokens=request.add_special_tokens,
        shard_size=request.shard_size,
        batch_size=request.batch_size,
    )
