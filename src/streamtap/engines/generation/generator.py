"""Completions of one model: requests queue up, and a thread runs them together, step by step.

::

    submit ─► waiting ─► step (prompts that fit the token budget + one token of everything that runs) ─► events
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from streamtap.completion import Cancel, CompletionRequest, Delta, Emit
from streamtap.engines.generation.admission import Admission
from streamtap.engines.generation.running import RequestRun
from streamtap.engines.generation.sequence import SequenceRun
from streamtap.engines.generation.step import Member, Outcome, Stepper
from streamtap.errors import EngineFailed, EngineOutOfMemory, InvalidInput, ServerRestarting, StreamtapError

_LOG = logging.getLogger(__name__)
#: Sequences that may be in the middle of their text at once; more would hold more keys and values.
MOST_RUNNING = 64
#: How far a step may pass its budget where that empties the queue: a small step after it would cost more.
_STRETCH = 1.25


class Generator:
    """Runs requests on ``stepper``; a thread starts with the first request and ends with ``close``.

    Args:
        admission: Makes a request's sequences.
        stepper: Runs a step.
        max_step_tokens: Prompt tokens in one step, a quarter more where none is left then; a longer prompt runs by
            itself.
        device_lock: Held during a step, since a model runs one pass at a time.
    """

    def __init__(
        self, admission: Admission, stepper: Stepper, *, max_step_tokens: int, device_lock: threading.Lock
    ) -> None:
        self._admission, self._stepper = admission, stepper
        self._max_step_tokens, self._device_lock = max_step_tokens, device_lock
        self._arrived = threading.Condition()
        self._waiting: deque[Member] = deque()
        self._running: list[Member] = []
        self._of: dict[SequenceRun, RequestRun] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def live(self) -> int:
        """Sequences that wait or run."""
        with self._arrived:
            return len(self._of)

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """See ``Completes.submit``."""
        run = self._admission.run_of(request, emit)
        with self._arrived:
            if self._closed:
                raise InvalidInput("this engine is closed, so its model is gone; load it again.")
            self._of.update(dict.fromkeys(run.sequences, run))
            self._waiting.extend(_members(run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="streamtap-generator", daemon=True)
                self._thread.start()
            self._arrived.notify()

        def cancel() -> None:
            run.cancel()
            with self._arrived:
                self._arrived.notify()

        return cancel

    def close(self) -> None:
        """Fail whatever waits or runs and end the thread."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._closed or self._waiting or self._running)
                self._forget_the_left()
                members = [] if self._closed else self._next_step()
                if self._closed:
                    break
            if members:
                self._step(members)
        for run in set(self._of.values()):
            _tell(run, (), ServerRestarting("the engine is closing; send the request again."))
        self._of.clear()

    def _next_step(self) -> list[Member]:
        """Everything that runs, and the prompts that fit beside it, first come first served."""
        members = list(self._running)
        running = len(members)
        stretched = int(self._max_step_tokens * _STRETCH)
        room = (stretched if _tokens(self._waiting) <= stretched - running else self._max_step_tokens) - running
        taken = 0
        while self._waiting:
            member = self._waiting[0]
            tokens = len(member.sequence.prompt_ids)
            joining = 1 + len(member.followers) if member.sequence.goes_on else 0
            if (taken and tokens > room) or (running and joining and running + joining > MOST_RUNNING):
                break
            self._waiting.popleft()
            members.append(member)
            running += joining
            room -= tokens
            taken += 1
        return members

    def _step(self, members: Sequence[Member]) -> None:
        try:
            with self._device_lock:
                outcomes = self._stepper.run(members)
        except torch.OutOfMemoryError:
            self._after_out_of_memory(members)
            return
        except StreamtapError as error:
            self._fail(members, error)
            return
        except Exception as error:
            # The edge of the thread: whatever a model's own code raises ends these requests and no other.
            _LOG.exception("a step of %d sequences failed", len(members))
            self._fail(members, EngineFailed(f"the engine failed with {type(error).__name__}; its log says where."))
            return
        self._after(members, outcomes)

    def _after(self, members: Sequence[Member], outcomes: Sequence[Outcome]) -> None:
        of_run: dict[RequestRun, list[Outcome]] = {}
        for outcome in outcomes:
            if (run := self._of.get(outcome.sequence)) is not None:
                of_run.setdefault(run, []).append(outcome)
        for run, its in of_run.items():
            error = next((outcome.error for outcome in its if outcome.error is not None), None)
            _tell(run, [delta for outcome in its for delta in outcome.deltas], error)
        with self._arrived:
            steering = {member.sequence: member.steering for member in members}
            for member in members:
                steering.update(dict.fromkeys(member.followers, member.steering))
            for sequence in steering:
                if sequence.done:
                    sequence.states = None  # others of its request may go on for long
            alive = [sequence for sequence in steering if not sequence.done and sequence in self._of]
            self._running = [Member(sequence, steering[sequence]) for sequence in alive]
            self._forget_the_left()

    def _after_out_of_memory(self, members: Sequence[Member]) -> None:
        """Run the prompts again, fewer at a time; one that alone does not fit fails."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        prompts = [member for member in members if not member.sequence.is_prefilled]
        if len(prompts) > 1:
            self._max_step_tokens = max(1, min(self._max_step_tokens, _tokens(prompts)) // 2)
            _LOG.warning("out of memory: going on with steps of %d tokens", self._max_step_tokens)
            with self._arrived:
                self._waiting.extendleft(reversed(prompts))
            return
        victims = prompts or members[-1:]
        tokens = _tokens(victims)
        self._fail(
            victims, EngineOutOfMemory(f"a prompt of {tokens} tokens does not fit into the engine's memory now.")
        )

    def _fail(self, members: Sequence[Member], error: StreamtapError) -> None:
        for member in members:
            run = self._of.get(member.sequence)
            if run is not None:
                _tell(run, (), error)
        with self._arrived:
            self._forget_the_left()

    def _forget_the_left(self) -> None:
        """Let go of the sequences of requests that are over."""
        over = [sequence for sequence, run in self._of.items() if run.is_over]
        for sequence in over:
            del self._of[sequence]
            sequence.states = None
        self._running = [member for member in self._running if member.sequence in self._of]
        self._waiting = deque(member for member in self._waiting if member.sequence in self._of)


def _tell(run: RequestRun, deltas: Sequence[Delta], error: StreamtapError | None) -> None:
    """Tell a request's caller what a step gave it; whatever goes wrong in that is this request's alone."""
    try:
        if error is None:
            run.say(deltas)
        else:
            run.fail(error)
    except Exception as failure:
        # Also the edge of the thread: an answer that cannot be put together, or a listener that raises.
        _LOG.exception("a request could not be answered")
        run.fail(EngineFailed(f"the engine failed with {type(failure).__name__}; its log says where."))


def _members(run: RequestRun) -> list[Member]:
    """One member for each prompt; its other samples follow the first."""
    members = []
    for leader in run.sequences[:: run.request.n]:
        followers = run.sequences[leader.index + 1 : leader.index + run.request.n]
        members.append(Member(leader, run.steering, followers))
    return members


def _tokens(members: Iterable[Member]) -> int:
    return sum(len(member.sequence.prompt_ids) for member in members)
