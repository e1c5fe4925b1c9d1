"""Rows by a bulk harvest of the service: one job for many sequences, whose files are read over signed links.

::

    sequences ─► job (layers, positions and pooling in it) ─► waited for, be the service away or not
      ─► files, one after the other ─► each sequence's rows, if its tokens are those that were sent
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.capture.runs import TokenRun
from streamtap.client.harvests import HarvestJob
from streamtap.client.sync import Client
from streamtap.engines.api_asking import Asking
from streamtap.engines.api_told import Told, another_model
from streamtap.engines.by_sequence import Wanted
from streamtap.errors import CaptureMissed, StreamtapError, TransferFailed
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.shard_reader import HarvestedShard

#: Rows of a file together, about; it is held whole while its prompts are handed out.
_FILE_BYTES = 32 << 20
_MOST_FILE_PROMPTS = 256
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class JobRows(NamedTuple):
    """What a job is to keep of each prompt, in its own words."""

    positions: str
    pooling: str


def job_rows(runs: Sequence[TokenRun], pooling: str) -> JobRows | None:
    """How one job gives the rows that are wanted of every run: all of them or the last; None where none does."""
    if all(len(run.chosen) == 1 and run.chosen[0] == len(run.token_ids) - 1 for run in runs):
        return JobRows("last", "none")
    if all(len(run.chosen) == len(run.token_ids) for run in runs):
        return JobRows("last", "none") if pooling == "last_token" else JobRows("all", pooling)
    return None


@dataclass(frozen=True)
class Bulk:
    """Harvests by ``client``."""

    client: Client
    told: Told
    asking: Asking = field(repr=False)

    def submitted(self, runs: Sequence[TokenRun], wanted: Wanted, rows: JobRows) -> HarvestJob:
        """The job, taken on.

        A connection that breaks in the middle of it leaves the service with a job that nobody asks for: it is
        submitted again, for nothing is worse than to wait for one that there may not be.

        Raises:
            ScopeDenied: the key may not harvest.
            HarvestQuotaExceeded: it has had as many harvests as it may.
            HarvestUnsupported: the model is not harvested there.
            StreamtapError: whatever else the service refuses.
        """
        ids = [run.token_ids for run in runs]
        ask = partial(
            self.client.harvest,
            ids,
            model=self.told.id,
            layers=list(wanted.layers),
            positions=rows.positions,
            pooling=rows.pooling,  # type: ignore[arg-type]  # it was checked as one of ours
            shard_size=self._shard_size(runs, wanted, rows),
        )
        return self.asking(ask, even_in_doubt=True)

    @contextmanager
    def kept(self, job: HarvestJob) -> Iterator[None]:
        """What goes wrong inside ends the job too, which nobody would fetch."""
        try:
            yield
        except BaseException:
            with suppress(StreamtapError):
                job.cancel()
            raise

    def rows(self, job: HarvestJob, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[tuple[int, NDArray[Any]]]:
        """Place and rows [layers, rows, hidden] of each run, in order, once the job is done.

        Raises:
            HarvestFailed: it failed, or somebody cancelled it.
            HarvestQuotaExceeded: of a job of several, which had no slot before.
            InvalidInput: another model ran it than was loaded.
            CaptureMissed: a file holds other layers, or rows of other tokens than were sent.
            HarvestDamaged: a file is not what the manifest says.
            TransferFailed: the service is away for longer than we try.
        """
        with self.asking.plainly(), self.kept(job):
            self._wait(job)
        found = self.asking(job.open)
        first = 0
        for run in found.runs if isinstance(found, JoinedRuns) else (found,):
            _check_run(run, wanted, self.told)
            for shard in run.shards():
                own = [runs[first + place] for place in shard.indices]
                for place, rows in zip(shard.indices, self.asking(partial(_read, shard, own)), strict=True):
                    made = np.stack([rows[layer] for layer in wanted.layers])
                    yield first + place, made.astype(_BFLOAT16, copy=False)
            first += len(run)

    def _wait(self, job: HarvestJob) -> None:
        for _ in range(self.asking.insistence.max_retries):
            try:
                job.wait()
                return
            except TransferFailed as error:
                # A service that is away was waited for; a job of several that may not have been taken is sent again.
                if error.retryable:
                    raise
        job.wait()

    def _shard_size(self, runs: Sequence[TokenRun], wanted: Wanted, rows: JobRows) -> int:
        longest = max(len(run.token_ids) for run in runs) if rows == JobRows("all", "none") else 1
        width = (self.told.hidden or 1) * _BFLOAT16.itemsize
        return int(np.clip(_FILE_BYTES // (longest * len(wanted.layers) * width), 1, _MOST_FILE_PROMPTS))


def _read(shard: HarvestedShard, runs: Sequence[TokenRun]) -> list[dict[int, NDArray[Any]]]:
    """The rows of a file's prompts; whatever of it is not there is fetched."""
    rows = shard.rows(shard.indices)
    for place, run in zip(shard.indices, runs, strict=True):
        if not np.array_equal(shard.token_ids(place), run.token_ids):
            raise CaptureMissed(f"the harvest ran other tokens than were sent for prompt {run.name}.", layer=-1)
    return rows


def _check_run(run: HarvestedRun, wanted: Wanted, told: Told) -> None:
    """Refuse a run of other layers, or of another commit, where both it and the service tell theirs."""
    ran = run.manifest.provenance.get("commit")
    if told.revision is not None and ran is not None and ran != told.revision:
        raise another_model(told.id, "revision", told.revision, ran)
    if run.layers != wanted.layers:
        raise CaptureMissed(
            f"the harvest holds layers {list(run.layers)}; {list(wanted.layers)} were asked for.", layer=-1
        )
