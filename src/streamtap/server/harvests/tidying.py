"""Removing what bulk jobs leave behind: files that were kept long enough, and what belongs to no job any more."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from streamtap.errors import AccessDenied
from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.log import note

#: How long the files of a job that came to nothing stay: its worker may still be about to stop.
_GRACE_SECONDS = 120.0
#: How long a job waits for a worker at most; it holds a slot of its key.
_FORGOTTEN_DAYS = 7.0


class Tidying:
    """One gateway's share of it; that several do it at once does no harm.

    Args:
        spools: The folder of this machine in which workers put shards together.
        keep_days: How long the files of a job that is done are kept.
    """

    def __init__(self, harvests: Harvests, store: HarvestStore, spools: Path, *, keep_days: float) -> None:
        self._harvests, self._store, self._spools = harvests, store, spools
        self._keep_days = keep_days
        self._orphans: set[str] = set()
        self._told_to_stop = threading.Event()

    def stop(self) -> None:
        """Remove nothing more than the run under way; for the end of the gateway, which would wait for all of it."""
        self._told_to_stop.set()

    def once(self) -> None:
        """Remove what there is; blocks.

        Raises:
            TransferFailed: the store fails; the next call goes on.
        """
        store = self._store.identity
        self._harvests.fail_forgotten(days=_FORGOTTEN_DAYS)
        for job in self._harvests.to_clear(store=store, keep_days=self._keep_days, grace_seconds=_GRACE_SECONDS):
            if self._told_to_stop.is_set():
                return
            self._clear(job)
        self._remove_orphans()

    def _clear(self, job: Job) -> None:
        try:
            self._store.remove_run(job.run_id)
        except AccessDenied as error:
            # One that the store does not let go of must not keep all the others.
            note("harvest_not_cleared", job=job.id, code=error.code)
        else:
            self._harvests.cleared(job.id)

    def _remove_orphans(self) -> None:
        # Listed before the jobs are: what is made in between belongs to one of them.
        spools = [path for path in self._spools.iterdir() if path.is_dir()] if self._spools.is_dir() else []
        inputs = self._store.input_ids()
        jobs = self._harvests.under_way(store=self._store.identity)
        runs, ids = {job.run_id for job in jobs}, {job.id for job in jobs}
        for spool in spools:
            if spool.name not in runs:
                shutil.rmtree(spool, ignore_errors=True)
        # A request is there before its job: only what is alone at two looks in a row is left over.
        alone = inputs - ids
        for job_id in alone & self._orphans:
            self._store.remove_input(job_id)
        self._orphans = alone
