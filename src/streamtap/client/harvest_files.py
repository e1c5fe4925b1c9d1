"""The files of jobs that are done: read where they lie, or brought to a folder. What is here blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from streamtap.client.harvest_calls import links_of
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.links import LinkReader
from streamtap.errors import InvalidInput
from streamtap.harvested.fetching import OnBytes, fetch_run
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.joining import fetch_joined
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.wire.harvest_jobs import JobView

#: A job as it is now, with links that are signed anew.
Ask = Callable[[str], JobView]


class HarvestFiles:
    """The files of a harvest's jobs, in the order of their prompts.

    Args:
        status: All of them are done.
        base: Address of the server.
        reader: Follows links.
        ask: Asks after a job, for links that are still good.

    Raises:
        InvalidInput: a job is not over.
        HarvestNotFound: files that are not there, or no more.
    """

    def __init__(self, status: HarvestStatus, base: str, reader: LinkReader, ask: Ask) -> None:
        if status.unsent_prompts or not status.jobs:
            raise InvalidInput(
                f"{status.unsent_prompts} prompts of the harvest are in no job yet; wait() submits them."
            )
        self._places = [self._place(job, base, reader, ask) for job in status.jobs]

    def open(self) -> HarvestedRun | JoinedRuns:
        """One reader over all prompts; only the manifests are read."""
        runs = [HarvestedRun.open(place) for place in self._places]
        return runs[0] if len(runs) == 1 else JoinedRuns(runs)

    def download(self, folder: Path, on_bytes: OnBytes, should_stop: Callable[[], bool]) -> Path:
        """All prompts as one run in ``folder``."""
        if len(self._places) == 1:
            fetch_run(self._places[0], folder, on_bytes=on_bytes, should_stop=should_stop)
        else:
            fetch_joined(self._places, folder, on_bytes=on_bytes, should_stop=should_stop)
        return folder

    def _place(self, job: JobView, base: str, reader: LinkReader, ask: Ask) -> LinkedPlace:
        job_id = job.job_id

        def refresh() -> Mapping[str, str]:
            return links_of(ask(job_id), base)

        return LinkedPlace(links_of(job, base), reader.get, refresh, url=f"harvest {job_id}")
