"""One request in the engine: its sequences, what it says to its caller, and whether it was left."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from streamtap.capture.steering import Steering
from streamtap.completion import CompletionRequest, Delta, Emit, Event, Failed, Finished, Usage
from streamtap.engines.generation.sequence import SequenceRun
from streamtap.errors import StreamtapError


class RequestRun:
    """A request and its sequences; events are emitted in order, one ``Finished`` or ``Failed`` last."""

    def __init__(
        self, request: CompletionRequest, sequences: Sequence[SequenceRun], steering: Steering | None, emit: Emit
    ) -> None:
        self.request, self.sequences, self.steering = request, tuple(sequences), steering
        self._emit = emit
        self._lock = threading.RLock()  # an emit may cancel
        self._over = False

    @property
    def is_over(self) -> bool:
        """Whether it was answered, failed, or left by its caller."""
        return self._over

    def cancel(self) -> None:
        """The caller is gone: nothing is emitted from now on, and the work stops with the step that runs."""
        with self._lock:
            self._over = True

    def say(self, deltas: Sequence[Delta]) -> None:
        """All new text of a step, of every sequence; then the answer, once all of them are done."""
        if self.request.stream:
            for delta in deltas:
                self._send(delta)
        if not self._over and all(sequence.done for sequence in self.sequences):
            self._send(Finished(tuple(each.choice() for each in self.sequences), self._usage()), last=True)

    def fail(self, error: StreamtapError) -> None:
        """End it with ``error``."""
        self._send(Failed(error), last=True)

    def _send(self, event: Event, *, last: bool = False) -> None:
        with self._lock:
            if self._over:
                return
            self._over = last
            try:
                self._emit(event)
            except Exception:
                self._over = True  # whoever cannot be told is gone
                raise

    def _usage(self) -> Usage:
        prompts = sum(len(each.prompt_ids) for each in self.sequences if each.index % self.request.n == 0)
        return Usage(prompts, sum(len(each.token_ids) for each in self.sequences))
