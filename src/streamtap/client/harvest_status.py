"""Where a harvest stands, be it one job or several."""

from __future__ import annotations

from dataclasses import dataclass

from streamtap.wire.harvest_jobs import JobState, JobView


@dataclass(frozen=True)
class HarvestStatus:
    """The jobs of a harvest as the server told of them last, in the order of their prompts.

    ``unsent_prompts`` are in no job yet: they wait for a slot.
    """

    jobs: tuple[JobView, ...]
    unsent_prompts: int = 0

    @property
    def state(self) -> JobState:
        """Of the whole: ``failed`` or ``cancelled`` as soon as one job is, ``done`` once all are."""
        states = {job.status for job in self.jobs}
        for ended in ("failed", "cancelled"):
            if ended in states:
                return ended
        if states <= {"done"} and not self.unsent_prompts:
            return "done"
        return "pending" if states <= {"pending"} else "running"

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("failed", "cancelled", "done") and all(job.is_over for job in self.jobs)

    @property
    def n_prompts(self) -> int:
        """Prompts of the whole."""
        return sum(job.n_prompts for job in self.jobs) + self.unsent_prompts

    @property
    def prompts_done(self) -> int:
        """Prompts whose rows are in files; all of a job that is done."""
        return sum(job.n_prompts if job.status == "done" else job.prompts_done for job in self.jobs)

    @property
    def shards_done(self) -> int:
        """Files that are there."""
        return sum(job.shards_done for job in self.jobs)
