"""What can be done with a harvest, as plans: submit its jobs, look, wait, cancel.

::

    prompts ─► jobs, as many as one server takes ─► submitted while there are slots ─► the rest when a job ends
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamtap.client.calls import models_call
from streamtap.client.harvest_bodies import (
    AROUND_BYTES,
    HarvestOptions,
    JobLimits,
    JobPrompt,
    cut_into_jobs,
    halves,
    harvest_fields,
    harvest_layers,
    harvest_prompts,
    needs_depth,
)
from streamtap.client.harvest_calls import (
    LONGEST_POLL_SECONDS,
    NO_SLOT,
    Looked,
    cancel_call,
    job_call,
    submit_call,
)
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.plans import Pause, Plan
from streamtap.client.retrying import PATIENT, Retries
from streamtap.errors import (
    EngineFailed,
    HarvestFailed,
    HarvestNotCancellable,
    InvalidInput,
    ModelNotFound,
    NotServing,
    RequestTooLarge,
    StreamtapError,
    TransferFailed,
)
from streamtap.layers import LayerSpec
from streamtap.wire.harvest_jobs import JobView

OnProgress = Callable[[HarvestStatus], None]

_DEFAULT_SLOT_SECONDS = 30
#: How long a poll is held where somebody wants to see progress, or prompts wait for a slot.
_SHORT_POLL_SECONDS = 2
_FIRST_BACKOFF_SECONDS, _LARGEST_BACKOFF_SECONDS = 1.0, 30.0
#: A server that is gone for the moment; the job goes on without it, or is gone on with when it is back.
_AWAY = (TransferFailed, NotServing, EngineFailed)


class HarvestPlans:
    """The jobs of one harvest, and its prompts that are in no job yet. Of use to one thread at a time.

    Args:
        jobs: What was submitted, in the order of the prompts.
        fields: The body of those that were not, without prompts.
        unsent: Their prompts, job by job.
        retries: How patient to be with a server that is away.
        poll_seconds: The longest that one poll may be held.
    """

    def __init__(
        self,
        jobs: Sequence[JobView] = (),
        fields: Mapping[str, Any] | None = None,
        unsent: Sequence[list[JobPrompt]] = (),
        *,
        retries: Retries | None = PATIENT,
        poll_seconds: float = LONGEST_POLL_SECONDS,
    ) -> None:
        self._jobs, self._fields, self._unsent = list(jobs), dict(fields or {}), list(unsent)
        self._retries = retries or Retries(patience_seconds=0.0, connects=0)
        self._poll_seconds = max(1, math.floor(min(poll_seconds, LONGEST_POLL_SECONDS)))
        #: Not sent before, for a body may be of megabytes: when the server said, unless a job of ours ends sooner.
        self._send_at = -math.inf

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the jobs that were submitted."""
        return tuple(job.job_id for job in self._jobs)

    @property
    def known(self) -> HarvestStatus:
        """What the server told last."""
        return HarvestStatus(tuple(self._jobs), sum(map(len, self._unsent)))

    def submit(self, *, patient: bool) -> Plan[None]:
        """Submit jobs until none is left or there is no slot; ``patient`` waits for the first one's.

        An error's note says which jobs were taken before: they go on.
        """
        try:
            yield from self._submit(patient)
        except StreamtapError as error:
            if self._jobs:
                sent = sum(job.n_prompts for job in self._jobs)
                before = f"the jobs before it go on: {', '.join(self.ids)}."
                error.add_note(f"This is of the job that begins with prompt {sent} of the harvest; {before}")
            raise

    def _submit(self, patient: bool) -> Plan[None]:
        at_once = () if patient else NO_SLOT
        while self._unsent:
            try:
                job = yield submit_call(self._fields, self._unsent[0], at_once)
            except RequestTooLarge:
                # The server counts tokens; here those of texts are guessed.
                if len(self._unsent[0]) == 1:
                    raise
                self._unsent[:1] = halves(self._unsent[0])
                continue
            except at_once as error:
                self._send_at = self._retries.now() + (error.retry_after_seconds or _DEFAULT_SLOT_SECONDS)
                return
            del self._unsent[0]
            self._jobs.append(job)
            at_once = NO_SLOT

    def look(self) -> Plan[HarvestStatus]:
        """Ask after every job that is not known to be over, and after the links of those that are."""
        for place in range(len(self._jobs)):
            yield from self._look(place)
        return self.known

    def wait(
        self, timeout_seconds: float | None, on_progress: OnProgress | None, *, only_submit: bool = False
    ) -> Plan[None]:
        """Until all jobs are done, those too that are submitted when a slot is free; or until all are submitted.

        Raises:
            HarvestFailed: one failed or was cancelled.
            TimeoutError: it takes longer.
        """
        now = self._retries.now
        end = math.inf if timeout_seconds is None else now() + timeout_seconds
        patience, self._send_at = _Patience(self._retries), -math.inf
        while self._unsent or not only_submit:
            try:
                yield from self._step(end - now(), often=on_progress is not None, only_submit=only_submit)
            except _AWAY as error:
                pause = patience.after(error)
                if now() + pause > end:
                    raise
                yield Pause(pause)
                continue
            patience = _Patience(self._retries)
            if on_progress is not None:
                on_progress(self.known)
            self._raise_failure()
            if self.known.is_over or (only_submit and not self._unsent):
                return
            if now() >= end:
                raise TimeoutError(f"{self._named()} is {self.known.state} after {timeout_seconds} s; it goes on.")

    def cancel(self) -> Plan[HarvestStatus]:
        """End every job that is not over; what was not submitted will not be.

        Raises:
            HarvestNotCancellable: all are over.
        """
        refused: list[HarvestNotCancellable] = []
        asked = len(self._jobs)
        self._unsent.clear()
        for job_id in self.ids:
            try:
                yield cancel_call(job_id)
            except HarvestNotCancellable as error:
                refused.append(error)
        if refused and len(refused) == asked:
            raise refused[0]
        return (yield from self.look())

    def _step(self, left_seconds: float, *, often: bool, only_submit: bool) -> Plan[None]:
        """One round: submit what there is a slot for, then watch the jobs that are not over."""
        if self._unsent and self._retries.now() >= self._send_at:
            yield from self.submit(patient=False)
        if only_submit and not self._unsent:
            return
        open_jobs = [place for place, job in enumerate(self._jobs) if not job.is_over]
        if not open_jobs:
            if self._unsent:
                # Others hold the slots.
                yield Pause(max(0.0, min(self._send_at - self._retries.now(), left_seconds)))
            return
        is_short = often or bool(self._unsent)
        for place in open_jobs[1:] if is_short else ():
            yield from self._look(place)
        hold = min(self._poll_seconds, _SHORT_POLL_SECONDS if is_short else LONGEST_POLL_SECONDS)
        yield from self._hold(open_jobs[0], min(hold, left_seconds))

    def _hold(self, place: int, seconds: float) -> Plan[None]:
        """Look at a job, for so long as it goes on; the server holds the answer, or we wait."""
        began = self._retries.now()
        looked = yield from self._look(place, max(0, math.floor(seconds)))
        if self._jobs[place].is_over:
            return
        if looked.declined_seconds is not None:
            yield Pause(max(0.0, min(looked.declined_seconds, seconds)))
        elif (rest := min(_SHORT_POLL_SECONDS, seconds) - (self._retries.now() - began)) > 0:
            # A part of a second, which no server holds, or a server that holds nothing.
            yield Pause(rest)

    def _look(self, place: int, wait_seconds: int = 0) -> Plan[Looked]:
        looked: Looked = yield job_call(self._jobs[place].job_id, wait_seconds)
        self._jobs[place] = looked.job
        if looked.job.is_over:
            self._send_at = -math.inf
        return looked

    def _raise_failure(self) -> None:
        for job in self._jobs:
            if job.status == "cancelled":
                raise HarvestFailed(f"harvest {job.job_id} was cancelled.")
            if job.status == "failed":
                why = "the server does not say why" if job.error is None else str(job.error)
                raise HarvestFailed(f"harvest {job.job_id} failed: {why}") from job.error

    def _named(self) -> str:
        return f"harvest {', '.join(self.ids)}" if self.ids else "the harvest"


class _Patience:
    """How long a server may be away in the middle of a wait."""

    def __init__(self, retries: Retries) -> None:
        self._retries, self._since, self._next = retries, retries.now(), _FIRST_BACKOFF_SECONDS

    def after(self, error: StreamtapError) -> float:
        """Seconds until it is asked again; what is not worth waiting out is raised."""
        wait = float(error.retry_after_seconds or self._next)
        gone = self._retries.now() - self._since + wait
        if not error.retryable or gone > self._retries.patience_seconds:
            raise error
        self._retries.waiting(error)
        self._next = min(self._next * 2, _LARGEST_BACKOFF_SECONDS)
        return wait


def begin(
    prompts: Any, model: str, layers: LayerSpec | None, options: HarvestOptions, make: Callable[..., HarvestPlans]
) -> Plan[HarvestPlans]:
    """Submit the first jobs of a harvest; ``make`` makes its plans from fields and prompts.

    Raises:
        InvalidInput: what cannot be asked.
    """
    fields, listed = harvest_fields(model, options), harvest_prompts(prompts)
    limits, n_layers = JobLimits(), None
    around = len(str(fields.get("project_onto", ""))) + AROUND_BYTES
    if needs_depth(layers) or len(cut_into_jobs(listed, limits, around)) > 1:
        capabilities = _capabilities((yield models_call()), model)
        limits, n_layers = JobLimits.told(capabilities), capabilities.get("n_layers")
    chosen = harvest_layers(layers, n_layers)
    told = fields if chosen is None else {**fields, "layers": chosen}
    plans = make(fields=told, unsent=cut_into_jobs(listed, limits, around))
    yield from plans.submit(patient=True)
    return plans


def resume(job_ids: Sequence[str], make: Callable[..., HarvestPlans]) -> Plan[HarvestPlans]:
    """The harvest of jobs that were submitted before, in the order of their prompts.

    Raises:
        HarvestNotFound: one is not there, or another key's.
    """
    if not job_ids:
        raise InvalidInput("name the harvest by the id, or ids, that it got when it was submitted.")
    jobs = []
    for job_id in job_ids:
        looked: Looked = yield job_call(job_id)
        jobs.append(looked.job)
    return make(jobs=jobs)


def _capabilities(models: Sequence[Mapping[str, Any]], model: str) -> Mapping[str, Any]:
    found = next((each for each in models if each.get("id") == model), None)
    if found is None:
        live = ", ".join(str(each.get("id")) for each in models) or "none"
        raise ModelNotFound(f"the server has no model {model!r}; it has {live}.")
    capabilities = found.get("capabilities")
    return capabilities if isinstance(capabilities, Mapping) else {}
