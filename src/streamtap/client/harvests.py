"""``HarvestJob``: a bulk harvest on a server, from its submission to its rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self, TypeVar

from streamtap.client.harvest_files import HarvestFiles
from streamtap.client.harvest_plans import HarvestPlans, OnProgress
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.plans import Plan
from streamtap.harvested.fetching import OnBytes, never, nobody
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun

T = TypeVar("T")


class Carrier(Protocol):
    """What a job needs of the client that made it."""

    def carry_out(self, plan: Plan[T]) -> T:
        """What a plan comes to."""
        ...

    def harvest_files(self, status: HarvestStatus) -> HarvestFiles:
        """The files of jobs that are done, to be read after the client is closed too."""
        ...


class HarvestJob:
    """A harvest that was submitted; ``Client.harvest`` and ``Client.harvest_job`` make it.

    A server takes so many prompts in a job; of more it is several jobs, ``ids``, in the order of the prompts. Those
    that there was no slot for yet are submitted by ``wait``. What was submitted runs to its end with nobody asking.
    Of use to one thread at a time.
    """

    def __init__(self, carrier: Carrier, plans: HarvestPlans) -> None:
        self._carrier, self._plans = carrier, plans

    def __repr__(self) -> str:
        known = self._plans.known
        return f"HarvestJob({', '.join(self.ids)}: {known.state}, {known.prompts_done}/{known.n_prompts} prompts)"

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the jobs that were submitted; ``Client.harvest_job(*ids)`` comes back to them."""
        return self._plans.ids

    @property
    def known(self) -> HarvestStatus:
        """Where it stood when the server was asked last; asks nothing."""
        return self._plans.known

    def status(self) -> HarvestStatus:
        """Where it stands."""
        return self._carrier.carry_out(self._plans.look())

    def wait(self, timeout_seconds: float | None = None, *, on_progress: OnProgress | None = None) -> Self:
        """Return when all of it is done; ``on_progress`` is told every other second.

        A server that is away in the meantime is waited for as the client's ``retries`` say.

        Raises:
            HarvestFailed: a job failed or was cancelled.
            TimeoutError: it takes longer; it goes on, and may be waited for again.
            StreamtapError: the server refuses a job that had no slot before.
        """
        self._carrier.carry_out(self._plans.wait(timeout_seconds, on_progress))
        return self

    def submit_rest(self, timeout_seconds: float | None = None, *, on_progress: OnProgress | None = None) -> Self:
        """Return when no prompt waits for a slot any more, so that nobody has to wait for the jobs themselves.

        Raises:
            HarvestFailed, TimeoutError, StreamtapError: as ``wait``.
        """
        self._carrier.carry_out(self._plans.wait(timeout_seconds, on_progress, only_submit=True))
        return self

    def cancel(self) -> HarvestStatus:
        """End it; files of a job that was done before stay.

        Raises:
            HarvestNotCancellable: all of it is over.
        """
        return self._carrier.carry_out(self._plans.cancel())

    def open(self) -> HarvestedRun | JoinedRuns:
        """Its rows, read where they lie: only the bytes that are asked for, over signed links.

        Raises:
            InvalidInput: it is not done.
            HarvestNotFound: its files are kept no longer.
        """
        return self._carrier.harvest_files(self.status()).open()

    def download(
        self,
        folder: str | os.PathLike[str],
        *,
        on_bytes: OnBytes = nobody,
        should_stop: Callable[[], bool] = never,
    ) -> Path:
        """Bring the files to ``folder``, where ``HarvestedRun.open`` reads them; the same call goes on with a part.

        Several jobs come as one run, whose prompts are numbered over all of them.

        Raises:
            InvalidInput: it is not done.
            HarvestNotFound: its files are kept no longer.
            HarvestDamaged: a file is not what the manifest says.
            HarvestMismatch: the folder holds another run.
            NotEnoughSpace: the disk is full.
            TransferFailed: the server or store failed for longer than we try.
        """
        files = self._carrier.harvest_files(self.status())
        return files.download(Path(folder).expanduser().absolute(), on_bytes, should_stop)
