"""``Heart``: the thread that keeps a job for its worker, and that hears when it is to stop."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from streamtap.harvest.run import Progress
from streamtap.server.harvests.jobs import Job
from streamtap.server.ledger.harvests import Harvests, Word
from streamtap.server.log import note

BEAT_SECONDS = 1.0
#: Between two beats at least, however fast shards become whole.
_LEAST_SECONDS = 0.1


class Heart:
    """Beats for one job while its block runs.

    Args:
        harvests: The ledger's side.
        job: The job that was claimed.
        worker: Who claimed it.
        lease_seconds: Silent for so long, and the job counts as another's: this worker stops by itself then.
        told_to_stop: Set when the process is to end.
    """

    def __init__(
        self,
        harvests: Harvests,
        job: Job,
        worker: str,
        *,
        lease_seconds: float,
        told_to_stop: threading.Event,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._harvests, self._job, self._worker = harvests, job, worker
        self._lease_seconds, self._beat_seconds = lease_seconds, beat_seconds
        self._told_to_stop = told_to_stop
        self._is_over = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamtap-heart", daemon=True)
        self._progress = Progress()
        self._heard = self._counted = time.monotonic()
        self.word: Word = "go"

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Beat once more, so that what was done by now is known."""
        self._is_over = True
        self._woken.set()
        self._thread.join()

    def progress(self, progress: Progress) -> None:
        """What is whole by now; from any thread. It is told at once: should the worker be killed, it is known."""
        self._progress = progress
        self._woken.set()

    def should_stop(self) -> bool:
        """Whether the work is to end: cancelled, another's, or the process is told to stop."""
        return self.word != "go" or self._told_to_stop.is_set() or self._is_silent()

    @property
    def is_held(self) -> bool:
        """Whether the job is still this worker's, as far as it can know."""
        return self.word == "go" and not self._is_silent()

    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard > self._lease_seconds

    def _run(self) -> None:
        # On a thread of its own, so that what a database raises is looked at and ends nothing.
        with ThreadPoolExecutor(1, thread_name_prefix="streamtap-beat") as pool:
            is_over = False
            while not is_over:
                self._woken.wait(self._beat_seconds)
                self._woken.clear()
                is_over = self._is_over
                if (error := pool.submit(self._beat).exception()) is not None:
                    note("harvest_beat_failed", job=self._job.id, error=type(error).__name__)
                if not is_over:
                    time.sleep(_LEAST_SECONDS)

    def _beat(self) -> None:
        at, done = time.monotonic(), self._progress
        seconds = at - self._counted
        word = self._harvests.beat(
            self._job.id, self._worker, done.prompts_done, done.shards_done, seconds=max(0.0, seconds)
        )
        self._heard = self._counted = at
        # Once lost is lost: a beat that came through late must not bring it back.
        self.word = word if self.word == "go" else self.word
