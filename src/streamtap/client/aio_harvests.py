"""``AsyncHarvestJob``: ``HarvestJob``, awaited."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Protocol, Self, TypeVar

from streamtap.client.harvest_files import HarvestFiles
from streamtap.client.harvest_plans import HarvestPlans, OnProgress
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.plans import Plan
from streamtap.harvested.fetching import OnBytes, nobody
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun

T = TypeVar("T")


class AsyncCarrier(Protocol):
    """What a job needs of the client that made it."""

    async def carry_out(self, plan: Plan[T]) -> T:
        """What a plan comes to."""
        ...

    def harvest_files(self, status: HarvestStatus) -> HarvestFiles:
        """The files of jobs that are done, to be read after the client is closed too."""
        ...


class AsyncHarvestJob:
    """As ``HarvestJob``, for asyncio; the reader that ``open`` gives blocks, so read in ``asyncio.to_thread``."""

    def __init__(self, carrier: AsyncCarrier, plans: HarvestPlans) -> None:
        self._carrier, self._plans = carrier, plans

    def __repr__(self) -> str:
        known = self._plans.known
        return f"AsyncHarvestJob({', '.join(self.ids)}: {known.state}, {known.prompts_done}/{known.n_prompts} prompts)"

    @property
    def ids(self) -> tuple[str, ...]:
        """As ``HarvestJob.ids``."""
        return self._plans.ids

    @property
    def known(self) -> HarvestStatus:
        """As ``HarvestJob.known``."""
        return self._plans.known

    async def status(self) -> HarvestStatus:
        """As ``HarvestJob.status``."""
        return await self._carrier.carry_out(self._plans.look())

    async def wait(self, timeout_seconds: float | None = None, *, on_progress: OnProgress | None = None) -> Self:
        """As ``HarvestJob.wait``, with the same errors."""
        await self._carrier.carry_out(self._plans.wait(timeout_seconds, on_progress))
        return self

    async def submit_rest(self, timeout_seconds: float | None = None, *, on_progress: OnProgress | None = None) -> Self:
        """As ``HarvestJob.submit_rest``, with the same errors."""
        await self._carrier.carry_out(self._plans.wait(timeout_seconds, on_progress, only_submit=True))
        return self

    async def cancel(self) -> HarvestStatus:
        """As ``HarvestJob.cancel``, with the same errors."""
        return await self._carrier.carry_out(self._plans.cancel())

    async def open(self) -> HarvestedRun | JoinedRuns:
        """As ``HarvestJob.open``, with the same errors."""
        files = self._carrier.harvest_files(await self.status())
        return await asyncio.to_thread(files.open)

    async def download(self, folder: str | os.PathLike[str], *, on_bytes: OnBytes = nobody) -> Path:
        """As ``HarvestJob.download``, with the same errors; a task that is cancelled ends it, and may go on later.

        ``on_bytes`` is called from another thread.
        """
        files = self._carrier.harvest_files(await self.status())
        stopped = threading.Event()
        path = Path(folder).expanduser().absolute()
        work = asyncio.ensure_future(asyncio.to_thread(files.download, path, on_bytes, stopped.is_set))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stopped.set()
            # The folder is free for the next call once the threads have ended.
            await asyncio.wait([work])
            work.exception()
            raise
