"""``Working``: takes jobs one after the other, does each, and says how it ended; until idle, or told to stop.

::

    claim ─► request from its private file ─► engine (loaded once) ─► run_harvest ─► done
    cancelled, or another's │ told to stop ─► pending │ may pass ─► later │ cannot be done ─► failed
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from streamtap.errors import (
    CaptureMissed,
    EngineFailed,
    EngineOutOfMemory,
    HarvestDamaged,
    HarvestMismatch,
    InvalidLayers,
    InvalidPositions,
    InvalidPrompt,
    NotEnoughSpace,
    StreamtapError,
)
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.server.harvests.asking import ask_of
from streamtap.server.harvests.engines import LoadedEngine
from streamtap.server.harvests.heart import Heart
from streamtap.server.harvests.jobs import Job, JobError
from streamtap.server.harvests.orders import WorkerOrders
from streamtap.server.harvests.storage import HarvestStore, private_folder
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.log import note
from streamtap.wire.harvest import read_harvest

#: How often an idle worker looks for a job, in seconds: what a job waits at most.
_LOOK_SECONDS = 0.25
#: A worker whose own state may be broken, so that the next job gets a new process.
_BROKEN = 1
#: What the gateway checks before a job is taken on, so that it is rarely found here.
_CALLERS = (InvalidPrompt, InvalidPositions, InvalidLayers)
#: Failures of the server's own that the contract has a code for.
_KNOWN = (CaptureMissed, EngineOutOfMemory, EngineFailed)


class Working:
    """One worker.

    Args:
        name: Unlike that of any other worker.
        lane: The jobs that it takes.
        told_to_stop: Set when the process is to end; the job under way waits for the next worker then.
    """

    def __init__(
        self,
        orders: WorkerOrders,
        harvests: Harvests,
        engine: LoadedEngine,
        *,
        name: str,
        lane: str,
        told_to_stop: threading.Event,
    ) -> None:
        self._orders, self._harvests, self._engine = orders, harvests, engine
        self._name, self._lane, self._told_to_stop = name, lane, told_to_stop
        self._models = orders.of_lane(lane)
        self._store = HarvestStore(orders.root)
        self._spools = Path(orders.spools)

    def run(self) -> int:
        """Work until idle for long enough or told to stop; the exit status of the process.

        Raises:
            SettingsError: a folder cannot be used.
        """
        private_folder(self._spools)
        last = time.monotonic()
        while not self._told_to_stop.is_set():
            if (job := self._next()) is not None:
                if not self.do(job):
                    return _BROKEN
                last = time.monotonic()
            elif time.monotonic() - last >= self._orders.idle_seconds:
                break
            else:
                self._told_to_stop.wait(_LOOK_SECONDS)
        return 0

    def _next(self) -> Job | None:
        models, store = [*self._models], self._store.identity
        # Looked at without a lock first: most looks find nothing.
        if not self._harvests.waiting(models, store=store, lane=self._lane):
            return None
        loaded = self._engine.model_id
        return self._harvests.claim(self._name, models, store=store, lane=self._lane, loaded=loaded)

    def do(self, job: Job) -> bool:
        """Do a job that was claimed, and settle it; False where this process had better end."""
        note("harvest_taken", job=job.id, model=job.model, worker=self._name, attempt=job.attempts)
        begun = time.monotonic()
        heart = Heart(
            self._harvests,
            job,
            self._name,
            lease_seconds=self._orders.lease_seconds,
            told_to_stop=self._told_to_stop,
        )
        timings: dict[str, float] = {}
        error: Exception | None = None
        with heart:
            try:
                self._harvest(job, heart, timings)
            except Exception as caught:  # the edge of a job: whatever it was, the job is told how it ended
                error = caught
        how = self._settle(job, heart, timings, error)
        seconds = round(time.monotonic() - begun, 3)
        note("harvest_over", job=job.id, model=job.model, how=how, seconds=seconds, **_about(error))
        return error is None or isinstance(error, StreamtapError | OSError)

    def _harvest(self, job: Job, heart: Heart, timings: dict[str, float]) -> None:
        begun = time.monotonic()
        request = read_harvest(self._request(job))
        engine = self._engine.of(self._models[job.model])
        timings["loading_s"] = round(time.monotonic() - begun, 3)
        begun = time.monotonic()
        run_harvest(
            engine,
            read_prompts(request.prompts, engine.tokenizer, add_special_tokens=request.add_special_tokens),
            self._store.run(job.run_id),
            ask_of(request),
            spool=self._spools / job.run_id,
            run_id=job.run_id,
            on_progress=heart.progress,
            should_stop=heart.should_stop,
            model_id=job.model,
        )
        timings["harvest_s"] = round(time.monotonic() - begun, 3)

    def _request(self, job: Job) -> bytes:
        try:
            return self._store.get_input(job.id)
        except FileNotFoundError as error:
            raise HarvestDamaged("the request of this job is gone from the store; send it again.") from error

    def _settle(self, job: Job, heart: Heart, timings: dict[str, float], error: Exception | None) -> str:
        """Say how it ended, and remove what nobody needs any more; gives the word for it."""
        if error is None:
            return self._ended(job, self._harvests.done(job.id, self._name, _with_waiting(timings, job)), "done")
        if not heart.is_held:
            return self._ended(job, heart.word == "cancel", "cancelled", otherwise="lost")
        if self._told_to_stop.is_set():
            self._harvests.let_go(job.id, self._name)
            return "let go"
        told = _told(error, loaded="loading_s" in timings)
        if _may_pass(error):
            self._harvests.put_off(job.id, self._name, told)
            return "put off"
        refund = not isinstance(error, _CALLERS)
        return self._ended(job, self._harvests.failed(job.id, self._name, told, refund=refund), "failed")

    def _ended(self, job: Job, is_ours: bool, how: str, *, otherwise: str = "lost") -> str:
        if not is_ours:
            # Whoever has it now may be at the same files.
            return otherwise
        self._store.remove_input(job.id)
        shutil.rmtree(self._spools / job.run_id, ignore_errors=True)
        return how


def _may_pass(error: Exception) -> bool:
    """Whether another try may do better: a full disk, a store or device that fails, or whatever nobody foresaw."""
    if isinstance(error, StreamtapError):
        # Another process may still be at the run's spool, which is a mismatch too.
        return error.retryable or isinstance(error, OSError | HarvestMismatch)
    return True


def _with_waiting(timings: dict[str, float], job: Job) -> dict[str, float]:
    began = job.started_at or job.created_at
    return {"waiting_s": round((began - job.created_at).total_seconds(), 3), **timings}


def _about(error: Exception | None) -> dict[str, str]:
    """What the log says of a failure; texts of ours hold no prompt, those of others might."""
    if error is None:
        return {}
    if isinstance(error, StreamtapError):
        return {"code": error.code, "detail": str(error)}
    return {"code": StreamtapError.code, "detail": type(error).__name__}


def _told(error: Exception, *, loaded: bool) -> JobError:
    """What the key is told: a mistake of the caller's in full; of the server's own no paths and addresses."""
    if isinstance(error, _CALLERS):
        return JobError(error.code, str(error))
    code = error.code if isinstance(error, _KNOWN) else StreamtapError.code
    what = type(error).__name__
    if isinstance(error, NotEnoughSpace):
        what = "its disk is full"
    elif not loaded:
        code, what = EngineFailed.code, "its engine could not be loaded"
    return JobError(code, f"the server could not do this harvest: {what}. Its log says more; nothing was charged.")
